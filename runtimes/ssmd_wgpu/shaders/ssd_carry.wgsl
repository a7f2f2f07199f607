// Mamba-2 by chunks, 3 of 4: from chunk to chunk; what each adds gives way to the state that it begins with.
const H = {{ heads }}u;
const SIZE = {{ heads * head_dim * states }}u;  // of a state
const Q = {{ chunk }}u;
@group(0) @binding(0) var<storage, read> LOGS: array<f32>;  // (T, H)
@group(0) @binding(1) var<storage, read_write> CHUNKS: array<f32>;  // (T / Q, H, D, N)
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<f32>;  // (slots, H, D, N)

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = (group.y * groups.x + group.x) * 64u + li;
  if (i >= SIZE) { return; }
  let h = i / {{ head_dim * states }}u;
  let state = CTL[2] * SIZE + i;
  var s = SSM[state];
  for (var t0 = 0u; t0 < CTL[1]; t0 += Q) {
    let at = t0 / Q * SIZE + i;
    let added = CHUNKS[at];
    CHUNKS[at] = s;
    s = s * exp(LOGS[(min(t0 + Q, CTL[1]) - 1u) * H + h]) + added;
  }
  SSM[state] = s;
}
