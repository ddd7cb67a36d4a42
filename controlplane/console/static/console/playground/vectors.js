// Vectors and labels: one or two texts in; the vectors' first numbers and similarity, or bars, out.

import { send } from "./stream.js";

const part = document.querySelector("[data-vectors]");
const [model, button] = [part.querySelector("[data-model]"), part.querySelector("button")];
const [state, out] = [part.querySelector("[data-state]"), part.querySelector("[data-out]")];

function line(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function bar({ label, score }) {
  const meter = document.createElement("meter");
  meter.max = 1;
  meter.value = score;
  meter.setAttribute("aria-label", label);
  return line("div", meter, ` ${label} ${(100 * score).toFixed(1)} %`);
}

function shown(index, told) {
  const title = line("h3", `Text ${index + 1}`);
  if (told.labels) return [title, ...told.labels[index].map(bar)];
  const numbers = told.vectors[index].map((number) => number.toFixed(4)).join(", ");
  return [title, line("p", line("code", `[${numbers}, …]`), ` ${told.dimensions} numbers`)];
}

export function watchVectors(token) {
  button.addEventListener("click", async () => {
    const input = [...part.querySelectorAll("textarea")].map((field) => field.value).filter(Boolean);
    out.replaceChildren();
    state.textContent = "Running";
    button.disabled = true;
    try {
      const response = await send(part.dataset.vectors, { model: model.value, input }, token);
      const told = await response.json();
      out.append(...input.flatMap((_, index) => shown(index, told)));
      if (told.similarity !== null) out.append(line("p", `Similarity ${told.similarity.toFixed(4)}`));
      state.textContent = `Done, ${told.prompt_tokens} tokens`;
    } catch (error) {
      state.textContent = error.message;
    }
    button.disabled = false;
  });
}
