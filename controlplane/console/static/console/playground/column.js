// One column: the models that it names, its answer as it streams, and what is told of it.

import { LANGUAGES } from "./code.js";
import { countWords, differences, told } from "./diff.js";
import { Refused, chunksOf, send } from "./stream.js";

let lastNumber = 0;

function milliseconds(value) {
  return value < 10_000 ? `${Math.round(value).toLocaleString("en")} ms` : `${(value / 1000).toFixed(1)} s`;
}

export class Column {
  // `page` has form, token, baseUrl, log and bodyOf(column); `changed` is called when a run has ended.
  constructor(page, parts, { onRemove, onEnd }) {
    this.page = page;
    this.number = ++lastNumber;
    this.root = document.querySelector("#column").content.firstElementChild.cloneNode(true);
    this.onEnd = onEnd;
    this.text = "";
    this.isDone = false;
    this.language = "curl";
    const find = (name) => this.root.querySelector(`[data-${name}]`);
    this.ui = Object.fromEntries(
      ["title", "parts", "blend", "state", "error", "error-text", "answer", "changes", "code", "code-text", "thought", "thought-text"]
        .map((name) => [name, find(name)]),
    );
    find("remove").addEventListener("click", () => onRemove(this));
    find("again").addEventListener("click", () => this.run());
    this.caseForm = find("case"); // only for people who may make suites
    this.caseForm?.addEventListener("submit", () => {
      const { elements } = this.caseForm;
      elements.messages.value = JSON.stringify(this.asked, null, 1);
      elements.expected.value = this.text;
    });
    this.ui.blend.addEventListener("click", () => this.addPart({ name: "", weight: 1 }).focus());
    this.ui.code.addEventListener("toggle", () => this.showCode());
    this.root.addEventListener("input", () => this.showCode());
    for (const button of this.root.querySelectorAll("[data-language]")) {
      button.addEventListener("click", () => this.choose(button));
    }
    this.ui["code-text"].id = `code-${this.number}`;
    this.root.querySelector(".copy").dataset.copy = `#code-${this.number}`;
    for (const part of parts) this.addPart(part);
  }

  place(number, count) {
    this.ui.title.textContent = `Model ${number}`;
    this.root.querySelector("[data-reference]").hidden = count === 1 || number > 1;
    this.ui.answer.setAttribute("aria-label", `Answer of model ${number}`);
    const remove = this.root.querySelector("[data-remove]");
    remove.hidden = count === 1;
    remove.setAttribute("aria-label", `Remove model ${number}`);
    this.place_ = number;
    this.labelParts();
  }

  addPart({ name, weight }) {
    const row = document.querySelector("#part").content.firstElementChild.cloneNode(true);
    const field = row.querySelector("[data-name]");
    field.value = name;
    row.querySelector("[data-weight]").value = weight;
    row.querySelector("[data-drop]").addEventListener("click", () => {
      row.remove();
      this.labelParts();
      this.ui.blend.focus();
      this.showCode();
    });
    this.ui.parts.append(row);
    this.labelParts();
    return field;
  }

  labelParts() {
    const rows = [...this.ui.parts.children];
    const isBlend = rows.length > 1;
    this.ui.parts.classList.toggle("blended", isBlend);
    rows.forEach((row, index) => {
      const what = isBlend ? `Adapter ${index + 1} of model ${this.place_}` : `Name of model ${this.place_}`;
      row.querySelector("[data-name]").setAttribute("aria-label", what);
      const weight = row.querySelector("[data-weight]");
      weight.setAttribute("aria-label", `Weight of adapter ${index + 1}`);
      weight.hidden = weight.disabled = !isBlend; // a hidden field must not block the form
      row.querySelector("[data-drop]").hidden = !isBlend;
      row.querySelector("[data-drop]").setAttribute("aria-label", `Remove adapter ${index + 1}`);
    });
    this.ui.blend.hidden = rows.length >= 8;
  }

  // Returns the fields of a request's body that say which model answers.
  get selector() {
    const parts = [...this.ui.parts.children].map((row) => ({
      name: row.querySelector("[data-name]").value.trim(),
      weight: row.querySelector("[data-weight]").valueAsNumber,
    }));
    return parts.length > 1 ? { adapters: parts } : { model: parts[0].name };
  }

  choose(button) {
    this.language = button.dataset.language;
    for (const other of this.root.querySelectorAll("[data-language]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    this.showCode();
  }

  showCode() {
    if (!this.ui.code.open) return;
    let text;
    try {
      text = LANGUAGES[this.language](this.page.baseUrl, this.page.bodyOf(this));
    } catch (error) {
      text = error.message;
    }
    this.ui["code-text"].textContent = text;
  }

  say(state, kind = "") {
    this.ui.state.textContent = state;
    this.root.classList.toggle("busy", kind === "busy");
    this.root.classList.toggle("failed", kind === "failed");
    this.ui.answer.setAttribute("aria-busy", String(kind === "busy"));
  }

  figure(name, value) {
    this.root.querySelector(`[data-figure="${name}"]`).textContent = value;
  }

  get isRunning() {
    return this.controller !== undefined;
  }

  stop() {
    this.controller?.abort();
  }

  async run() {
    this.stop();
    const controller = this.controller = new AbortController();
    this.text = "";
    this.isDone = false;
    this.ui.error.hidden = this.ui.changes.hidden = true;
    if (this.caseForm) this.caseForm.hidden = true;
    this.ui.thought.hidden = true;
    this.ui["thought-text"].textContent = "";
    this.ui.answer.replaceChildren(document.createTextNode(""));
    for (const name of ["first", "speed", "total", "read", "written", "reason", "served"]) this.figure(name, "–");
    this.say("Waiting for the first token", "busy");
    this.onEnd();
    try {
      const body = this.page.bodyOf(this);
      await this.read(body, controller.signal);
      this.isDone = true;
      this.asked = body.messages;
      if (this.caseForm) this.caseForm.hidden = false;
      this.say("Done");
    } catch (error) {
      if (this.controller !== controller) return; // it runs again
      if (controller.signal.aborted) this.say("Stopped");
      else this.fail(error);
    }
    if (this.controller !== controller) return;
    this.controller = undefined;
    this.onEnd();
  }

  async read(body, signal) {
    const began = performance.now();
    const response = await send(this.page.form.dataset.run, body, this.page.token, signal);
    this.figure("served", response.headers.get("X-Lorikeet-Served") ?? "–");
    this.logged(response.headers.get("X-Request-Id"));
    let first, last;
    for await (const chunk of chunksOf(response)) {
      const choice = chunk.choices[0];
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (content || thought) {
        last = performance.now();
        if (first === undefined) {
          first = last;
          this.figure("first", milliseconds(first - began));
        }
        this.say(content ? "Answering" : "Thinking", "busy");
        if (thought) this.think(thought);
        if (content) this.append(content);
      }
      if (choice?.finish_reason) this.figure("reason", choice.finish_reason);
      if (chunk.usage) this.count(chunk.usage, last - first);
    }
    this.figure("total", milliseconds(performance.now() - began));
  }

  count(usage, tookMs) {
    this.figure("read", usage.prompt_tokens.toLocaleString("en"));
    this.figure("written", usage.completion_tokens.toLocaleString("en"));
    const speed = (usage.completion_tokens - 1) / tookMs * 1000;
    this.figure("speed", Number.isFinite(speed) && speed > 0 ? speed.toFixed(1) : "–");
  }

  think(text) {
    this.ui.thought.hidden = false;
    this.ui["thought-text"].append(text);
  }

  append(text) {
    const { answer } = this.ui;
    const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
    this.text += text;
    answer.firstChild.appendData(text);
    if (atEnd) answer.scrollTop = answer.scrollHeight;
  }

  logged(requestId) {
    const line = this.root.querySelector("[data-logged]");
    line.hidden = !requestId || !this.page.log;
    line.firstElementChild.href = `${this.page.log}/${requestId}`;
  }

  fail(error) {
    const text = this.ui["error-text"];
    text.replaceChildren();
    if (error instanceof Refused) {
      const kind = document.createElement("strong");
      kind.textContent = error.kind;
      text.append(kind, document.createElement("br"), error.message);
      if (error.param) text.append(` (field: ${error.param})`);
    } else {
      text.textContent = error instanceof TypeError
        ? "The console does not answer. Check your connection and try again." : error.message;
    }
    this.ui.error.hidden = false;
    this.say("Failed", "failed");
  }

  // Marks the differences from the reference's text; null: shows the text as it is.
  compare(reference) {
    const { answer, changes } = this.ui;
    changes.hidden = reference === null;
    if (reference === null) {
      answer.replaceChildren(document.createTextNode(this.text));
      return;
    }
    const counts = { deleted: 0, inserted: 0 };
    const nodes = differences(reference, this.text).map(([kind, text]) => {
      if (kind === "same") return document.createTextNode(text);
      counts[kind] += countWords(text);
      const mark = document.createElement(kind === "deleted" ? "del" : "ins");
      const spoken = document.createElement("span");
      spoken.className = "visually-hidden";
      spoken.textContent = ` [${kind}:`;
      const end = spoken.cloneNode();
      end.textContent = "] ";
      mark.append(spoken, text, end);
      return mark;
    });
    answer.replaceChildren(...nodes);
    changes.textContent = told(counts, reference === this.text);
  }
}
