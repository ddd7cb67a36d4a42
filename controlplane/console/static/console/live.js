// A [data-live] part of a page reloads itself, except while that is useless or disturbs: the page is
// hidden, or its reader has scrolled into the part, points at it or has selected text in it.

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
// Checked before the request, and again before its answer replaces the part: that may be much later.
for (const moment of ["htmx:beforeRequest", "htmx:beforeSwap"]) {
  document.addEventListener(moment, (event) => {
    const part = event.detail.elt;
    if (part.matches("[data-live]") && !mayChange(part)) event.preventDefault();
  });
}
