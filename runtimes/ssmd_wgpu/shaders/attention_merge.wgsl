// Puts together what attention.wgsl found in the pages of the cache, for one token of each stream.
const H = {{ heads }}u;
{% if gate %}
const G = {{ kv_heads }}u;
{% endif %}
const D = {{ head_dim }}u;
@group(0) @binding(0) var<storage, read> PARTS: array<f32>;  // (streams, H, most_pages, D + 2): sums, largest score, weight
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;  // (streams, H, D)
{% if gate %}
@group(0) @binding(2) var<storage, read> QKV: array<f32>;  // (streams, 2 H + 2 G, D)
{% include "output_gate.wgsl" %}
{% endif %}
{% include "control.wgsl" %}
{% include "merge.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let count = CTL[4u * group.y] / {{ page }}u + 1u;
  let head = group.y * H + group.x;
  let first = head * {{ most_pages }}u * (D + 2u);
  let largest = largest_of(first, count);
  let weight = merged(first, count, largest, D + 1u);
  for (var d = li; d < D; d += 64u) { Y[head * D + d] = merged(first, count, largest, d) / weight{{ " * gate_of(group.y, group.x, d)" if gate }}; }
}
