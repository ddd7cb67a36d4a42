// A [data-live] part of a page asks for itself anew, but not while that would disturb: nobody sees
// the page, its reader has scrolled into the part, or is about to do something in it.

const REST_MS = 2000;
let lastMoved = -Infinity;

function mayChange(part) {
  if (document.hidden || part.getBoundingClientRect().top < 0) return false;
  if (part.contains(document.activeElement) || performance.now() - lastMoved < REST_MS) return false;
  const selection = getSelection();
  return selection.isCollapsed || !selection.containsNode(part, true);
}

document.addEventListener("pointermove", (event) => {
  if (event.target.closest("[data-live]")) lastMoved = performance.now();
});
// Asked before the question, and again before its answer takes the part's place: that may take a while.
for (const moment of ["htmx:beforeRequest", "htmx:beforeSwap"]) {
  document.addEventListener(moment, (event) => {
    const part = event.detail.elt;
    if (part.matches("[data-live]") && !mayChange(part)) event.preventDefault();
  });
}
