// SHA-256 as hex. Browsers have it only for pages of https and of this machine; for others it is here.

const K = new Uint32Array(64);
const START = new Uint32Array(8);

// The constants are the first bits of the fractions of the primes' roots.
for (let n = 2, count = 0; count < 64; n++) {
  let isPrime = true;
  for (let divisor = 2; divisor * divisor <= n; divisor++) isPrime &&= n % divisor !== 0;
  if (!isPrime) continue;
  if (count < 8) START[count] = (Math.sqrt(n) % 1) * 2 ** 32;
  K[count++] = (Math.cbrt(n) % 1) * 2 ** 32;
}

export async function sha256(buffer) {
  if (globalThis.crypto?.subtle) return hex(await crypto.subtle.digest("SHA-256", buffer));
  return hex(digest(new Uint8Array(buffer)).buffer);
}

function hex(buffer) {
  return [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function digest(bytes) {
  const state = START.slice();
  const whole = bytes.length - (bytes.length % 64);
  compress(state, bytes, whole);
  const tail = new Uint8Array(bytes.length - whole < 56 ? 64 : 128);
  tail.set(bytes.subarray(whole));
  tail[bytes.length - whole] = 0x80;
  const view = new DataView(tail.buffer);
  view.setUint32(tail.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(tail.length - 4, (bytes.length * 8) >>> 0);
  compress(state, tail, tail.length);
  const result = new DataView(new ArrayBuffer(32));
  state.forEach((word, i) => result.setUint32(4 * i, word));
  return new Uint8Array(result.buffer);
}

function compress(state, bytes, length) {
  const w = new Uint32Array(64);
  for (let at = 0; at < length; at += 64) {
    for (let i = 0; i < 16; i++) {
      const j = at + 4 * i;
      w[i] = (bytes[j] << 24) | (bytes[j + 1] << 16) | (bytes[j + 2] << 8) | bytes[j + 3];
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15], y = w[i - 2];
      const s0 = rotated(x, 7) ^ rotated(x, 18) ^ (x >>> 3);
      const s1 = rotated(y, 17) ^ rotated(y, 19) ^ (y >>> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0; d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { state[i] += word; });
  }
}

function rotated(word, bits) {
  return (word >>> bits) | (word << (32 - bits));
}
