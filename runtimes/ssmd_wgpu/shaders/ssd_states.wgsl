// Mamba-2 by chunks, 2 of 4: what the tokens of a chunk add to the state, by its end. 32 values of a head by 32 states
// for each workgroup, 4 by 4 for each thread.
const H = {{ heads }}u;
const D = {{ head_dim }}u;
const N = {{ states }}u;
const Q = {{ chunk }}u;
@group(0) @binding(0) var<storage, read> U: array<f32>;  // (T, u_stride): x, B, C
@group(0) @binding(1) var<storage, read> DT: array<f32>;  // (T, H)
@group(0) @binding(2) var<storage, read> LOGS: array<f32>;  // (T, H)
@group(0) @binding(3) var<storage, read_write> CHUNKS: array<f32>;  // (T / Q, H, D, N)
{% include "control.wgsl" %}

var<workgroup> xs: array<vec4<f32>, {{ chunk * 8 }}>;  // (Q, 32 values)
var<workgroup> bs: array<vec4<f32>, {{ chunk * 8 }}>;  // (Q, 32 states)

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let h = group.x / {{ across }}u;
  let p0 = group.x % {{ across }}u / {{ deep }}u * 32u;
  let n0 = group.x % {{ deep }}u * 32u;
  let t0 = group.y * Q;
  let count = min(CTL[1] - t0, Q);
  let last = LOGS[(t0 + count - 1u) * H + h];
  for (var i = li; i < Q * 32u; i += 64u) {
    let t = t0 + i / 32u;
    let j = i % 32u;
    var x = 0.0;
    var b = 0.0;
    if (i / 32u < count) {
      let at = t * {{ u_stride }}u;
      if (p0 + j < D) { x = U[at + h * D + p0 + j] * DT[t * H + h] * exp(last - LOGS[t * H + h]); }
      if (n0 + j < N) { b = U[at + H * D + h / {{ heads // groups }}u * N + n0 + j]; }
    }
    xs[i / 4u][i % 4u] = x;
    bs[i / 4u][i % 4u] = b;
  }
  workgroupBarrier();
  let tp = li / 8u;
  let tn = li % 8u;
  var c = array<vec4<f32>, 4>();  // value, state
  for (var t = 0u; t < Q; t++) {
    let x = xs[t * 8u + tp];
    let b = bs[t * 8u + tn];
    c[0] += x.x * b;
    c[1] += x.y * b;
    c[2] += x.z * b;
    c[3] += x.w * b;
  }
  for (var i = 0u; i < 4u; i++) {
    let d = p0 + 4u * tp + i;
    for (var j = 0u; j < 4u; j++) {
      let n = n0 + 4u * tn + j;
      if (d < D && n < N) { CHUNKS[((group.y * H + h) * D + d) * N + n] = c[i][j]; }
    }
  }
}
