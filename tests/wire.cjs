// docs/wire.md in JavaScript, with npm's @msgpack/msgpack and @node-rs/xxhash as they are: run by test_exchange_wire_js.py.
// Reads JSON of hex from stdin, writes JSON to stdout: what is read in each message and transfer, and those written anew.
"use strict";
const { createHmac } = require("node:crypto");
const { readFileSync } = require("node:fs");
const { decode, decodeMulti, encode } = require("@msgpack/msgpack");
const { xxh3 } = require("@node-rs/xxhash");

const WIDE = { useBigInt64: true }; // a checksum has 64 bits

function head(size, write) {
  const bytes = Buffer.alloc(size);
  write(bytes);
  return bytes;
}

// "Prefix": fixarray of 4, fixstr "GE", uint 8 version, uint 32 and uint 64. "Header": a map that ends in a bin 32.
function message({ payload, ...fields }) {
  const entries = Object.entries(fields).flat().map((each) => encode(each, WIDE));
  const bin = head(5, (bytes) => { bytes[0] = 0xc6; bytes.writeUInt32BE(payload.length, 1); });
  const header = Buffer.concat([Buffer.of(0x81 + entries.length / 2), ...entries, encode("payload"), bin]);
  const prefix = head(20, (bytes) => {
    bytes.write("94a24745cc05ce", "hex");
    bytes.writeUInt32BE(header.length, 7);
    bytes[11] = 0xcf;
    bytes.writeBigUInt64BE(BigInt(payload.length), 12);
  });
  return Buffer.concat([prefix, header, payload]);
}

// "The checksum is XXH3 with 64 bits of the payload, with the tag as seed."
const checksum = (tag, payload) => xxh3.xxh64(payload, BigInt(tag));

// "93, uint 32 tag, uint 64 checksum, bin 32, the payload."
function transfer(tag, payload) {
  const first = head(20, (bytes) => {
    bytes[0] = 0x93;
    bytes[1] = 0xce;
    bytes.writeUInt32BE(tag, 2);
    bytes[6] = 0xcf;
    bytes.writeBigUInt64BE(checksum(tag, payload), 7);
    bytes[15] = 0xc6;
    bytes.writeUInt32BE(payload.length, 16);
  });
  return Buffer.concat([first, payload]);
}

// HMAC-SHA256 with the secret as key over msgpack of what is bound.
function proof(secret, bound) {
  return createHmac("sha256", secret).update(encode(bound)).digest();
}

const plain = (object) => ({ ...object, payload: Buffer.from(object.payload) });
// The same, packed as shortly as the stock packer does it, read and packed again.
const isStable = (object) => {
  const packed = encode(object, WIDE);
  return Buffer.compare(encode(decode(packed, WIDE), WIDE), packed) === 0;
};

function readMessage(hex) {
  const [prefix, header, ...more] = decodeMulti(Buffer.from(hex, "hex"), WIDE);
  return { prefix, header, more, written: message(plain(header)), isStable: isStable([prefix, header]) };
}

function readTransfer(hex) {
  const [[tag, check, payload], ...more] = decodeMulti(Buffer.from(hex, "hex"), WIDE);
  const again = { checksum: checksum(tag, payload), written: transfer(tag, Buffer.from(payload)) };
  return { tag, check, payload, more, ...again, isStable: isStable([tag, check, payload]) };
}

function shown(_, value) {
  if (typeof value === "bigint") return value <= 2n ** 53n ? Number(value) : `${value}`;
  if (value instanceof Uint8Array) return `hex:${Buffer.from(value).toString("hex")}`;
  return value?.type === "Buffer" ? `hex:${Buffer.from(value.data).toString("hex")}` : value;
}

const bytesOf = (value) => (String(value).startsWith("hex:") ? Buffer.from(value.slice(4), "hex") : value);
const asked = JSON.parse(readFileSync(0, "utf8"));
const answer = {
  messages: asked.messages.map(readMessage),
  transfers: asked.transfers.map(readTransfer),
  proofs: asked.proofs.map(([secret, ...bound]) => proof(secret, bound.map(bytesOf))),
};
process.stdout.write(JSON.stringify(answer, shown));
