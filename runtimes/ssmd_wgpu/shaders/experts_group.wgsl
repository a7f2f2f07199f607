// The pairs of a row and a chosen expert, grouped by expert and in the order of rows: which rows a product by experts takes,
// and its tiles of TILE pairs. A thread counts the pairs of every THREADS-th expert.
{% set e = experts %}
const COUNT = {{ e.count }}u;
const TILE = {{ e.tile }}u;
const THREADS = 256u;
@group(0) @binding(0) var<storage, read> EXPERTS: array<u32>;  // (T, CHOSEN)
@group(0) @binding(1) var<storage, read_write> GROUPS: array<u32>;  // see Groups in experts.py
{% include "control.wgsl" %}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) li: u32) {
  let pairs = CTL[1] * {{ e.chosen }}u;
  for (var e = li; e < COUNT; e += THREADS) { GROUPS[e + 1u] = 0u; }
  for (var i = 0u; i < pairs; i++) {
    let e = EXPERTS[i];
    if (e % THREADS == li) { GROUPS[e + 1u] += 1u; }
  }
  workgroupBarrier();
  storageBarrier();
  if (li == 0u) {
    var first = 0u;
    var tiles = 0u;
    GROUPS[0] = 0u;
    for (var e = 0u; e < COUNT; e++) {
      let count = GROUPS[e + 1u];
      GROUPS[e + 1u] = first;  // where its next pair goes; in the end, where the next expert's begin
      for (var t = 0u; t < count; t += TILE) {
        GROUPS[{{ e.tiles_at }}u + 2u * tiles] = e;
        GROUPS[{{ e.tiles_at }}u + 2u * tiles + 1u] = first + t;
        tiles++;
      }
      first += count;
    }
    GROUPS[COUNT + 1u] = tiles;
  }
  workgroupBarrier();
  storageBarrier();
  for (var i = 0u; i < pairs; i++) {
    let e = EXPERTS[i];
    if (e % THREADS == li) {
      let at = GROUPS[e + 1u];
      GROUPS[{{ e.places_at }}u + at] = i;
      GROUPS[e + 1u] = at + 1u;
    }
  }
}
