// columns.js: the packed block of live/pack.py, back as words and typed arrays. In: a DataView. Out: {words, columns}.

const ARRAYS = {
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, u8: BigUint64Array, i4: Int32Array, f4: Float32Array, f8: Float64Array,
};

export async function unpackBlock(view) {
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(inflated).arrayBuffer();
  const size = new DataView(raw).getUint32(0, true);
  const words = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, size)));
  const start = Math.ceil((4 + size) / 8) * 8;
  const columns = {};
  for (const [name, [kind, at, count]] of Object.entries(words.columns)) {
    columns[name] = new ARRAYS[kind](raw, start + at, count);
  }
  delete words.columns;
  return { words, columns };
}
