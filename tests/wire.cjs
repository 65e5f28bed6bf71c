// docs/specs/wire.md in JavaScript, with npm's @msgpack/msgpack and @node-rs/xxhash as they are: run by test_exchange_wire_js.py.
// Reads JSON of hex from stdin, writes JSON to stdout: what is read in each frame and message, and those written anew.
"use strict";
const { createHmac } = require("node:crypto");
const { readFileSync } = require("node:fs");
const { decode, decodeMulti, encode } = require("@msgpack/msgpack");
const { xxh3 } = require("@node-rs/xxhash");

const WIDE = { useBigInt64: true }; // a checksum has 64 bits

// "The checksum is XXH3 with 64 bits of the payload, with the tag as seed."
const checksum = (tag, payload) => xxh3.xxh64(payload, BigInt(tag));

// "93, uint 32 tag, uint 64 checksum, bin 32, the payload."
function frame(tag, payload) {
  const head = Buffer.alloc(20);
  head[0] = 0x93;
  head[1] = 0xce;
  head.writeUInt32BE(tag, 2);
  head[6] = 0xcf;
  head.writeBigUInt64BE(checksum(tag, payload), 7);
  head[15] = 0xc6;
  head.writeUInt32BE(payload.length, 16);
  return Buffer.concat([head, payload]);
}

// HMAC-SHA256 with the secret as key over msgpack of what is bound.
function proof(secret, bound) {
  return createHmac("sha256", secret).update(encode(bound)).digest();
}

// The same, packed as shortly as the stock packer does it, read and packed again.
const isStable = (object) => {
  const packed = encode(object, WIDE);
  return Buffer.compare(encode(decode(packed, WIDE), WIDE), packed) === 0;
};

function readFrame(hex) {
  const [[tag, check, payload], ...more] = decodeMulti(Buffer.from(hex, "hex"), WIDE);
  const again = { checksum: checksum(tag, payload), written: frame(tag, Buffer.from(payload)) };
  return { tag, check, payload, more, ...again, isStable: isStable([tag, check, payload]) };
}

// A message's payload is the msgpack array of its fields, which is packed anew too.
function readMessage(hex) {
  const read = readFrame(hex);
  const fields = decode(read.payload, WIDE);
  return { ...read, fields, written: frame(read.tag, Buffer.from(encode(fields, WIDE))) };
}

function shown(_, value) {
  if (typeof value === "bigint") return value <= 2n ** 53n ? Number(value) : `${value}`;
  if (value instanceof Uint8Array) return `hex:${Buffer.from(value).toString("hex")}`;
  return value?.type === "Buffer" ? `hex:${Buffer.from(value.data).toString("hex")}` : value;
}

const bytesOf = (value) => (String(value).startsWith("hex:") ? Buffer.from(value.slice(4), "hex") : value);
const asked = JSON.parse(readFileSync(0, "utf8"));
const answer = {
  frames: asked.frames.map(readFrame),
  messages: asked.messages.map(readMessage),
  proofs: asked.proofs.map(([secret, ...bound]) => proof(secret, bound.map(bytesOf))),
};
process.stdout.write(JSON.stringify(answer, shown));
