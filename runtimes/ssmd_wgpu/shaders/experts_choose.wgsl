// The experts of each row: the best CHOSEN of COUNT scores, of equal ones those that come first, and their shares.
{% include "vectors.wgsl" %}

const COUNT = {{ count }}u;
const CHOSEN = {{ chosen }}u;
@group(0) @binding(0) var<storage, read> SCORES: array<f32>;  // (T, COUNT), products of the router
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // router_bias (COUNT), see Vectors
@group(0) @binding(2) var<storage, read_write> EXPERTS: array<u32>;  // (T, CHOSEN), the best first
@group(0) @binding(3) var<storage, read_write> SHARES: array<f32>;  // (T, CHOSEN)

var<workgroup> keys: array<u32, 64>;
var<workgroup> places: array<u32, 64>;

fn score(row: u32, e: u32) -> f32 {
  let x = SCORES[row * COUNT + e];
  return {{ "1.0 / (1.0 + exp(-x))" if sigmoid else "x" }};
}

fn key(row: u32, e: u32) -> u32 {  // keys stand in the order of the scores that choose
  let x = score(row, e){% if bias is not none %} + p({{ bias }}u + e){% endif %};
  let bits = bitcast<u32>(select(x, 0.0, x == 0.0));  // zeros of both signs are equal
  return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = group.y;
  var last_key = 0u;  // of the expert that was chosen last
  var last = 0u;
  for (var rank = 0u; rank < CHOSEN; rank++) {
    var best = 0u;
    var place = COUNT;  // none yet
    for (var e = li; e < COUNT; e += 64u) {
      let k = key(row, e);
      if (rank > 0u && (k > last_key || (k == last_key && e <= last))) { continue; }  // chosen before
      if (k > best || place == COUNT) {
        best = k;
        place = e;
      }
    }
    keys[li] = best;
    places[li] = place;
    workgroupBarrier();
    for (var step = 32u; step > 0u; step /= 2u) {
      if (li < step) {
        let k = keys[li + step];
        let e = places[li + step];
        if (k > keys[li] || (k == keys[li] && e < places[li])) {
          keys[li] = k;
          places[li] = e;
        }
      }
      workgroupBarrier();
    }
    last_key = keys[0];
    last = places[0];
    if (li == 0u) { EXPERTS[row * CHOSEN + rank] = last; }
    workgroupBarrier();  // all have read them
  }
  if (li > 0u) { return; }
  let first = row * CHOSEN;
  {% if not sigmoid %}
  var largest = score(row, EXPERTS[first]);
  for (var i = 1u; i < CHOSEN; i++) { largest = max(largest, score(row, EXPERTS[first + i])); }
  {% endif %}
  var sum = 0.0;
  for (var i = 0u; i < CHOSEN; i++) {
    let share = {{ "score(row, EXPERTS[first + i])" if sigmoid else "exp(score(row, EXPERTS[first + i]) - largest)" }};
    SHARES[first + i] = share;
    sum += share;
  }
  {% if normed or not sigmoid %}
  for (var i = 0u; i < CHOSEN; i++) { SHARES[first + i] /= {{ "(sum + 1e-6)" if sigmoid else "sum" }}; }
  {% endif %}
}
