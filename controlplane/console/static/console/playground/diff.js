// Word differences between two texts.

// Most pairs of words that are compared one by one: 2,000 words with 2,000.
const MOST = 4e6;

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

// Returns [kind, text] in the order of reading; kind is "same", "deleted" or "inserted".
export function differences(before, after) {
  const a = words(before), b = words(after);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (
    tail < a.length - head && tail < b.length - head &&
    a[a.length - 1 - tail] === b[b.length - 1 - tail]
  ) tail++;
  const steps = [
    ...a.slice(0, head).map((word) => ["same", word]),
    ...middle(a.slice(head, a.length - tail), b.slice(head, b.length - tail)),
    ...a.slice(a.length - tail).map((word) => ["same", word]),
  ];
  return joined(steps);
}

function middle(a, b) {
  if (a.length * b.length > MOST) {  // too long to compare: all of it differs
    return [...a.map((word) => ["deleted", word]), ...b.map((word) => ["inserted", word])];
  }
  // The longest common subsequence, from the end, so that reading it goes forwards.
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] = a[i] === b[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const steps = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      steps.push(["same", a[i]]);
      i++;
      j++;
    } else if (j === b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      steps.push(["deleted", a[i++]]);
    } else {
      steps.push(["inserted", b[j++]]);
    }
  }
  return steps;
}

// Neighbours of one kind become one; within a change deletions come first.
function joined(steps) {
  const runs = [];
  let change = { deleted: "", inserted: "" };
  const flush = () => {
    for (const kind of ["deleted", "inserted"]) if (change[kind]) runs.push([kind, change[kind]]);
    change = { deleted: "", inserted: "" };
  };
  for (const [kind, text] of steps) {
    if (kind !== "same") {
      change[kind] += text;
      continue;
    }
    flush();
    if (runs.at(-1)?.[0] === "same") runs.at(-1)[1] += text;
    else runs.push(["same", text]);
  }
  flush();
  return runs;
}

export function countWords(text) {
  return words(text).filter((word) => /[\p{L}\p{N}]/u.test(word)).length;
}

// A sentence about the words that differ. It may name none: spaces and signs are no words.
export function told({ inserted, deleted }, isSame) {
  if (isSame) return "The same text as model 1.";
  if (inserted + deleted === 0) return "The same words as model 1; spaces or punctuation differ.";
  const words = (count) => `${count.toLocaleString("en")} ${count === 1 ? "word" : "words"}`;
  const changes = [];
  if (inserted) changes.push(`${words(inserted)} inserted (underlined)`);
  if (deleted) changes.push(`${words(deleted)} deleted (struck through)`);
  return `Compared with model 1: ${changes.join(", ")}.`;
}
