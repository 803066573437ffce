// Perfetto's own trace processor, as it is shipped for browsers, asked by a test:
//   node query.js FOLDER TRACE < queries.json > rows.json
// FOLDER holds engine_bundle.js and the WebAssembly that it loads; queries.json is a list of SQL texts.
// Requests and answers are messages of Perfetto's trace_processor.proto, written and read here by hand.
'use strict';
const fs = require('fs');
const path = require('path');

const [folder, trace] = process.argv.slice(2);
const FINALIZE = 2;
const APPEND = 1;
const QUERY = 3;

// Protocol buffers

function varint(number) {
  const bytes = [];
  for (let rest = BigInt(number); ; rest >>= 7n) {
    const low = Number(rest & 0x7fn);
    if (rest < 0x80n) return Buffer.from([...bytes, low]);
    bytes.push(low | 0x80);
  }
}

const tagged = (field, kind, data) => Buffer.concat([varint((field << 3) | kind), data]);
const number = (field, value) => tagged(field, 0, varint(value));
const bytes = (field, data) => tagged(field, 2, Buffer.concat([varint(data.length), data]));

function fields(buffer) {
  const found = [];
  let at = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < buffer.length) {
    const tag = Number(next());
    const kind = tag & 7;
    let value;
    if (kind === 0) {
      value = next();
    } else {
      const length = kind === 2 ? Number(next()) : kind === 1 ? 8 : 4;
      value = buffer.subarray(at, at + length);
      at += length;
    }
    found.push([tag >> 3, value]);
  }
  return found;
}

function packed(buffer) {
  const values = [];
  for (let at = 0; at < buffer.length; ) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) break;
    }
    values.push(value);
  }
  return values;
}

// The answer to a query: names of columns, and batches of cells, each kind of value in a list of its own.
function rows(result, table) {
  for (const [field, value] of fields(result)) {
    if (field === 1) table.columns.push(value.toString());
    if (field === 2) throw new Error(value.toString());
    if (field !== 3) continue;
    const batch = {cells: [], integers: [], floats: [], texts: []};
    for (const [part, data] of fields(value)) {
      if (part === 1) batch.cells.push(...packed(data).map(Number));
      if (part === 2) batch.integers.push(...packed(data));
      if (part === 3) for (let at = 0; at < data.length; at += 8) batch.floats.push(data.readDoubleLE(at));
      if (part === 5) batch.texts.push(...data.toString().split('\0'));
    }
    for (const kind of batch.cells) {
      if (kind === 1) table.cells.push(null);
      else if (kind === 2) table.cells.push(Number(BigInt.asIntN(64, batch.integers.shift())));
      else if (kind === 3) table.cells.push(batch.floats.shift());
      else table.cells.push(batch.texts.shift());
    }
  }
}

// What the bundle expects of a browser's worker

const started = new Promise((resolve) => {
  let answers = [];
  const port = {
    postMessage: (data) => answers.push(Buffer.from(data)),
    ask: (request) => {
      answers = [];
      port.onmessage({data: new Uint8Array(request)});
      return Buffer.concat(answers);
    },
  };
  globalThis.self = globalThis;
  globalThis.WorkerGlobalScope = function () {};
  globalThis.importScripts = () => {};
  globalThis.location = {href: ''};
  delete globalThis.process.versions.node;  // otherwise it looks for files as a script of Node
  globalThis.XMLHttpRequest = class {
    open(_, name) {
      this.response = fs.readFileSync(path.join(folder, path.basename(name)));
    }
    send() {}
  };
  globalThis.console.warn = () => {};
  const bundle = fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8');
  (0, eval)(bundle);
  globalThis.onmessage({data: port});
  resolve(port);
});

async function main() {
  const port = await started;
  let sequence = 0;
  // Until the module is compiled, requests fail.
  const send = async (kind, more = Buffer.alloc(0)) => {
    const message = Buffer.concat([number(1, sequence), number(2, kind), more]);
    for (let tries = 0; ; tries++) {
      try {
        const answer = port.ask(bytes(1, message));
        sequence++;
        return fields(answer).map(([, value]) => fields(value));
      } catch (error) {
        if (sequence || tries > 300) throw error;
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    }
  };
  await send(APPEND, bytes(101, fs.readFileSync(trace)));
  await send(FINALIZE);
  const results = [];
  for (const sql of JSON.parse(fs.readFileSync(0, 'utf8'))) {
    const table = {columns: [], cells: []};
    for (const message of await send(QUERY, bytes(103, bytes(1, Buffer.from(sql))))) {
      for (const [field, value] of message) {
        if (field === 5) throw new Error(value.toString());
        if (field === 203) rows(value, table);
      }
    }
    const width = table.columns.length;
    const found = [];
    for (let at = 0; at < table.cells.length; at += width) {
      found.push(Object.fromEntries(table.columns.map((name, k) => [name, table.cells[at + k]])));
    }
    results.push(found);
  }
  fs.writeFileSync(1, JSON.stringify(results));
}

main().then(
  () => process.exit(0),
  (error) => {
    fs.writeFileSync(2, `${error.stack || error}\n`);
    process.exit(1);
  },
);
