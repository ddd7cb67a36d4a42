// Keeps the keyboard's focus when htmx replaces what has it, or disables it during a request.

const focused = new WeakMap(); // by request

function remember({ detail: { xhr, elt, target } }) {
  const active = document.activeElement;
  if (elt.contains(active) || target?.contains(active)) focused.set(xhr, active);
}

// The element of the new part that is what the old one was.
function twin(old) {
  const traits = (element) => [element.name, element.href, element.textContent.trim()].join("\n");
  return [...document.querySelectorAll(old.localName)].find((each) => traits(each) === traits(old));
}

document.addEventListener("htmx:beforeRequest", remember);
document.addEventListener("htmx:beforeSwap", remember);
document.addEventListener("htmx:afterSettle", ({ detail: { xhr, requestConfig } }) => {
  const old = focused.get(xhr);
  if (!old || document.activeElement !== document.body) return;
  const next = old.isConnected ? old : document.querySelector("[aria-invalid=true]") ?? twin(old);
  next?.focus({ preventScroll: requestConfig.verb === "get" });
});
