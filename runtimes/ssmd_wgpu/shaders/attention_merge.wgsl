// Puts together what the workgroups of attention.wgsl found in their parts of the cache, for one token.
const H = {{ heads }}u;
const D = {{ head_dim }}u;
@group(0) @binding(0) var<storage, read> PARTS: array<f32>;  // (H, parts, D + 2): sums, largest score, weight
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;  // (H, D)
@group(1) @binding(0) var<storage, read> CTL: array<u32>;  // position, T, 0, 0, T tokens

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let count = CTL[0] / {{ part }}u + 1u;
  let first = group.x * {{ parts }}u * (D + 2u);
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
    Y[group.x * D + d] = sum / weight;
  }
}
