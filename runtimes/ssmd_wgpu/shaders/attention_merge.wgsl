// Puts together what the workgroups of attention.wgsl found in their parts of the cache, for one token of each stream.
const H = {{ heads }}u;
const D = {{ head_dim }}u;
@group(0) @binding(0) var<storage, read> PARTS: array<f32>;  // (streams, H, most_pages, D + 2): sums, largest score, weight
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;  // (streams, H, D)
{% include "control.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let count = CTL[4u * group.y] / {{ page }}u + 1u;
  let head = group.y * H + group.x;
  let first = head * {{ most_pages }}u * (D + 2u);
  var largest = -3.4e38;
  for (var i = 0u; i < count; i++) { largest = max(largest, PARTS[first + i * (D + 2u) + D]); }
  var weight = 0.0;
  for (var i = 0u; i < count; i++) {
    let at = first + i * (D + 2u);
    weight += PARTS[at + D + 1u] * exp(PARTS[at + D] - largest);
  }
  for (var d = li; d < D; d += 64u) {
    var sum = 0.0;
    for (var i = 0u; i < count; i++) {
      let at = first + i * (D + 2u);
      sum += PARTS[at + d] * exp(PARTS[at + D] - largest);
    }
    Y[head * D + d] = sum / weight;
  }
}
