// Names and keyboard access for what unfold and select2 make without them.

function scrollName(box) {
  if (box.closest("nav")) return "Menu";
  const table = box.querySelector("table");
  return table ? `Table ${[...document.querySelectorAll("table")].indexOf(table) + 1}` : "Filters";
}

function nameFields() {
  for (const select of document.querySelectorAll("select.select2-hidden-accessible")) {
    const name = select.getAttribute("aria-label") ?? select.labels[0]?.textContent.trim();
    for (const part of select.parentElement.querySelectorAll("[role=combobox], [role=textbox]")) {
      part.removeAttribute("aria-labelledby");
      part.setAttribute("aria-label", name);
    }
  }
  for (const header of document.querySelectorAll("th")) {
    if (header.textContent.trim()) continue;
    const name = document.createElement("span");
    name.className = "ops-hidden";
    name.textContent = "Actions";
    header.append(name);
  }
}

// What reacts to a click and is neither a link nor a button.
function nameClickable() {
  const found = "span[x-on\\:click]:not([role]), a[x-on\\:click]:not([href], [role])";
  for (const each of document.querySelectorAll(found)) {
    each.tabIndex = 0;
    each.setAttribute("role", "button");
    if (each.textContent.trim() === "dock_to_right") each.setAttribute("aria-label", "Menu");
    each.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      each.click();
    });
  }
}

function nameAll() {
  nameFields();
  nameClickable();
}

document.addEventListener("DOMContentLoaded", () => {
  // Read by SimpleBar when it starts, which is after this.
  for (const box of document.querySelectorAll("[data-simplebar]"))
    box.setAttribute("data-simplebar-aria-label", scrollName(box));
  nameAll();
  // select2 starts later, and forms get rows.
  new MutationObserver(nameAll).observe(document.body, { childList: true, subtree: true });
});
