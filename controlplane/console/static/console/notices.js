// Shows an error when an action by htmx failed. A poll that fails is repeated anyway, so it shows none.

function show(event, message) {
  if (event.detail.requestConfig?.verb === "get") return;
  document.querySelector("[data-notice]")?.remove();
  const notice = document.createElement("div");
  notice.className = "note error";
  notice.dataset.notice = "";
  notice.role = "alert";
  notice.textContent = message;
  document.querySelector("#main").prepend(notice);
  notice.scrollIntoView({ block: "nearest" });
}

document.addEventListener("htmx:sendError", (event) => {
  show(event, "The console does not answer. Check your connection and try again.");
});
document.addEventListener("htmx:responseError", (event) => {
  const status = event.detail.xhr.status;
  show(event, `The action failed: the console answered ${status}. Reload the page and try again.`);
});
