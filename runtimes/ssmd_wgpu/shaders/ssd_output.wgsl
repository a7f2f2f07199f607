// Mamba-2 by chunks, 4 of 4: what every token gives: of the tokens of its chunk up to itself by their scores C B^T, and of
// the state that its chunk begins with. 32 values of a head for each workgroup, 4 tokens by 4 values for each thread.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const H = {{ heads }}u;
const D = {{ head_dim }}u;
const N = {{ states }}u;
const Q = 32u;
@group(0) @binding(0) var<storage, read> U: array<f32>;  // (T, u_stride): x, B, C
@group(0) @binding(1) var<storage, read> Z: array<f32>;  // (T, z_stride): the gate from its start on
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // D (H), see Vectors
@group(0) @binding(3) var<storage, read> DT: array<f32>;  // (T, H)
@group(0) @binding(4) var<storage, read> LOGS: array<f32>;  // (T, H)
@group(0) @binding(5) var<storage, read> CHUNKS: array<f32>;  // (T / Q, H, D, N): the states that chunks begin with
@group(0) @binding(6) var<storage, read_write> Y: array<f32>;  // (T, H, D)
{% include "control.wgsl" %}

var<workgroup> left: array<vec4<f32>, 256>;  // (32 summed over, 32 tokens)
var<workgroup> right: array<vec4<f32>, 256>;  // (32 summed over, 32 of what is multiplied with)

fn multiplied(c: array<vec4<f32>, 4>, ti: u32, tj: u32) -> array<vec4<f32>, 4> {
  var sum = c;
  for (var k = 0u; k < 32u; k++) {
    let a = left[k * 8u + ti];
    let b = right[k * 8u + tj];
    sum[0] += a.x * b;
    sum[1] += a.y * b;
    sum[2] += a.z * b;
    sum[3] += a.w * b;
  }
  return sum;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let h = group.x / {{ wide }}u;
  let p0 = group.x % {{ wide }}u * 32u;
  let t0 = group.y * Q;
  let count = min(CTL[1] - t0, Q);
  let b0 = H * D + h / {{ heads // groups }}u * N;
  let c0 = b0 + {{ groups * states }}u;
  let ti = li / 8u;
  let tj = li % 8u;
  var scores = array<vec4<f32>, 4>();  // token, earlier token
  var out = array<vec4<f32>, 4>();  // token, value
  for (var n0 = 0u; n0 < N; n0 += 32u) {
    for (var i = li; i < 1024u; i += 64u) {  // C and B of the chunk's tokens
      let t = i % 32u;
      let n = n0 + i / 32u;
      let on = t < count && n < N;
      let at = (t0 + select(0u, t, on)) * {{ u_stride }}u + select(0u, n, on);
      left[i / 4u][i % 4u] = select(0.0, U[c0 + at], on);
      right[i / 4u][i % 4u] = select(0.0, U[b0 + at], on);
    }
    workgroupBarrier();
    scores = multiplied(scores, ti, tj);
    workgroupBarrier();
    for (var i = li; i < 1024u; i += 64u) {  // the state that the chunk begins with
      let d = p0 + i % 32u;
      let n = n0 + i / 32u;
      var s = 0.0;
      if (d < D && n < N) { s = CHUNKS[((group.y * H + h) * D + d) * N + n]; }
      right[i / 4u][i % 4u] = s;
    }
    workgroupBarrier();
    out = multiplied(out, ti, tj);
    workgroupBarrier();
  }
  for (var i = 0u; i < 4u; i++) {
    let t = 4u * ti + i;
    let log_t = LOGS[(t0 + min(t, count - 1u)) * H + h];
    out[i] *= exp(log_t);
    for (var j = 0u; j < 4u; j++) {
      let s = 4u * tj + j;
      var weight = 0.0;
      if (s <= t && t < count) { weight = exp(log_t - LOGS[(t0 + s) * H + h]) * DT[(t0 + s) * H + h]; }
      left[s * 8u + ti][i] = scores[i][j] * weight;
    }
  }
  for (var i = li; i < 1024u; i += 64u) {
    let s = i / 32u;
    let d = p0 + i % 32u;
    var x = 0.0;
    if (s < count && d < D) { x = U[(t0 + s) * {{ u_stride }}u + h * D + d]; }
    right[i / 4u][i % 4u] = x;
  }
  workgroupBarrier();
  out = multiplied(out, ti, tj);
  let skip = p({{ d }}u + h);
  for (var i = 0u; i < 4u; i++) {
    let t = 4u * ti + i;
    for (var j = 0u; j < 4u; j++) {
      let d = p0 + 4u * tj + j;
      if (t < count && d < D) {
        var y = out[i][j] + skip * U[(t0 + t) * {{ u_stride }}u + h * D + d];
        {% if gate %}
        y *= silu(Z[(t0 + t) * {{ z_stride }}u + h * D + d]);
        {% endif %}
        Y[((t0 + t) * H + h) * D + d] = y;
      }
    }
  }
}
