// Send files to the object store part by part, several at a time. A part whose connection breaks is
// sent again; what arrived stays, also when the page is closed.

import { sha256 } from "./sha256.js";

const PARALLEL = 4;
const MAX_ATTEMPTS = 12;
const MAX_PAUSE_S = 30;

// The server said no: to try again would not help.
export class Refused extends Error {}
export class Paused extends Error {}

export class Transfer {
  // files    by field: the File
  // state    () => what the server knows of each: part_bytes, num_parts, parts
  // sign     (field, number, sha256) => {url, headers}; rejects with Refused when it says no
  // report   ({sent, total, checked, waits_s}) is called often
  constructor({ files, state, sign, report }) {
    Object.assign(this, { files, state, sign, report });
    this.total = Object.values(files).reduce((sum, file) => sum + file.size, 0);
  }

  // Send what is missing. Rejects with Paused, Refused, or the last error of the connection.
  async run() {
    this.stopper = new AbortController();
    this.loaded = new Map(); // bytes of each part that are on their way or there
    const waiting = await this.missing();
    this.show();
    const lane = async () => {
      for (let part = waiting.shift(); part; part = waiting.shift()) await this.send(part);
    };
    try {
      await Promise.all(Array.from({ length: PARALLEL }, lane));
    } finally {
      this.stopper.abort(); // the other lanes, when one has failed
    }
  }

  pause() {
    this.stopper?.abort();
  }

  // The parts that the store does not have. Those that it has must be parts of these files.
  async missing() {
    const files = await this.retried(() => this.state());
    const found = [];
    for (const [field, { part_bytes, num_bytes, num_parts, parts }] of Object.entries(files)) {
      const file = this.files[field];
      if (file.size !== num_bytes) throw new Refused(`${file.name} is another file than before.`);
      const known = new Map(parts.map((part) => [part.number, part]));
      for (let number = 1; number <= num_parts; number++) {
        const part = { field, number, blob: file.slice((number - 1) * part_bytes, number * part_bytes) };
        const before = known.get(number);
        if (before) {
          this.check();
          this.report({ checked: file.name, sent: this.sent(), total: this.total });
          part.digest = await sha256(await bytesOf(part.blob, file));
          if (part.digest !== before.sha256)
            throw new Refused(`${file.name} is another file than before, or it has changed.`);
        }
        if (before?.is_uploaded) this.loaded.set(`${field} ${number}`, part.blob.size);
        else found.push(part);
      }
    }
    return found;
  }

  async send({ field, number, blob }) {
    const key = `${field} ${number}`;
    const bytes = await bytesOf(blob, this.files[field]);
    const digest = await sha256(bytes);
    await this.retried(async () => {
      const { url, headers } = await this.sign(field, number, digest);
      this.check();
      await put(url, headers, bytes, this.stopper.signal, (sent) => {
        this.loaded.set(key, sent);
        this.show();
      });
    }, () => this.loaded.delete(key));
    this.loaded.set(key, blob.size);
    this.show();
  }

  async retried(action, failed = () => {}) {
    for (let attempt = 1; ; attempt++) {
      this.check();
      try {
        return await action();
      } catch (error) {
        failed();
        this.check();
        if (error instanceof Refused || attempt === MAX_ATTEMPTS) throw error;
        // The store has forgotten the upload: the server finds out, and begins it again.
        if (error.status === 404) await this.state().catch(() => {});
        const waits_s = Math.min(MAX_PAUSE_S, 2 ** (attempt - 1)) * (0.5 + Math.random() / 2);
        this.report({ waits_s, sent: this.sent(), total: this.total });
        await pause(waits_s, this.stopper.signal);
      }
    }
  }

  check() {
    if (this.stopper.signal.aborted) throw new Paused();
  }

  sent() {
    return [...this.loaded.values()].reduce((sum, bytes) => sum + bytes, 0);
  }

  show() {
    this.report({ sent: this.sent(), total: this.total });
  }
}

async function bytesOf(blob, file) {
  try {
    return await blob.arrayBuffer();
  } catch {
    throw new Refused(`${file.name} cannot be read any more: choose it again.`);
  }
}

// fetch() cannot report how much of a body was sent.
function put(url, headers, bytes, signal, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const stop = () => request.abort();
    request.open("PUT", url);
    for (const [name, value] of Object.entries(headers))
      if (name !== "Content-Length") request.setRequestHeader(name, value); // the browser's own
    request.upload.addEventListener("progress", (event) => onProgress(event.loaded));
    request.addEventListener("load", () => {
      if (request.status < 300) resolve();
      else
        reject(
          Object.assign(new Error(`The object store answered ${request.status}.`), {
            status: request.status,
          }),
        );
    });
    request.addEventListener("error", () => reject(new Error("The connection broke.")));
    request.addEventListener("abort", () => reject(new Paused()));
    request.addEventListener("loadend", () => signal.removeEventListener("abort", stop));
    signal.addEventListener("abort", stop);
    request.send(bytes);
  });
}

// Wait; no longer than until the network is back, or somebody pauses.
function pause(seconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      globalThis.removeEventListener("online", end);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, seconds * 1000);
    globalThis.addEventListener("online", end);
    signal.addEventListener("abort", end);
  });
}
