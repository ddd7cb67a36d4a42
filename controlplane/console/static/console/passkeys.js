// Hides what a browser cannot do at this address, and shows why a passkey could not be used: allauth's
// script only logs it.

const NEEDS = "Passkeys need https and a domain name. This page's address does not have both.";
const REASONS = {
  NotAllowedError: "The passkey was not used: it was refused, or it took too long.",
  InvalidStateError: "This passkey is already added.",
  SecurityError: NEEDS,
};

// A number, in brackets or not, is no domain name.
if (!window.PublicKeyCredential || /^[\d.]+$|^\[/.test(location.hostname)) {
  for (const control of document.querySelectorAll("[data-passkey]")) {
    control.hidden = true;
    const note = document.createElement("p");
    note.className = "muted small";
    note.textContent = NEEDS;
    control.after(note);
  }
}

document.addEventListener("allauth.error", (event) => {
  event.preventDefault();
  const { exception } = event.detail;
  const note = document.createElement("div");
  note.className = "note error";
  note.setAttribute("role", "alert");
  note.textContent = REASONS[exception.name] ?? `The passkey could not be used: ${exception.message}`;
  document.querySelector(".card [role=alert].note")?.remove();
  document.querySelector(".card").prepend(note);
});
