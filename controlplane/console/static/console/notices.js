// Says so when something that the person did by htmx failed. A poll that fails asks again by
// itself, so it stays silent.

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
  show(event, `That did not work: the console answered ${status}. Reload the page and try again.`);
});
