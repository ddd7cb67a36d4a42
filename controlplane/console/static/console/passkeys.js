// Shows why a passkey could not be used: allauth's script only logs it.

const REASONS = {
  NotAllowedError: "The passkey was not used: it was refused, or it took too long.",
  InvalidStateError: "This passkey is already added.",
  SecurityError: "Passkeys need https and a domain name. This page's address does not have both.",
};

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
