// Y = norm(X) W^T + bias for T tokens, in tiles of TM tokens and TN rows of W. Each thread has one quad of tokens and one
// of rows, or two of each, which lie SIDE quads apart.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

const TM = {{ tile }}u;
const TN = {{ tile }}u;
const TK = 32u;
const SIDE = {{ tile // 4 // quads }}u;
const THREADS = SIDE * SIDE;
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), bias (N), see Vectors
@group(0) @binding(3) var<storage, read> X: array<f32>;  // (T, stride), of which K from an offset on
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (T, N), swiglu: (T, N / 2)
{% if gain is not none %}
@group(0) @binding(5) var<storage, read> R: array<f32>;  // (T): 1 / rms(x)
{% endif %}
{% include "control.wgsl" %}

var<workgroup> xs: array<vec4<f32>, {{ 32 * tile // 4 }}>;  // (TK, TM / 4)
var<workgroup> ws: array<vec4<f32>, {{ 32 * tile // 4 }}>;  // (TK, TN / 4)

fn finished(i: u32, sum: f32, t: u32) -> f32 {  // row i of this shader
  return sum{% if gain is not none %} * R[t]{% endif %}{% if bias is not none %} + p({{ bias }}u + row_of(i)){% endif %};
}

fn write(t: u32, n: u32, sums: vec4<f32>, count: u32) {  // of rows n to n + 3
  if (t >= count) { return; }
{% if end == "swiglu" %}
  for (var j = 0u; j < 4u; j += 2u) {
    if (n + j + 1u < N) {
      Y[t * {{ rows // 2 }}u + (n + j) / 2u] = silu(finished(n + j, sums[j], t)) * finished(n + j + 1u, sums[j + 1u], t);
    }
  }
{% elif end == "relu2" %}
  for (var j = 0u; j < 4u; j++) {
    let a = max(finished(n + j, sums[j], t), 0.0);
    if (n + j < N) { Y[t * N + n + j] = a * a; }
  }
{% else %}
  for (var j = 0u; j < 4u; j++) {
    if (n + j < N) { Y[t * N + n + j] {{ "+=" if end == "add" else "=" }} finished(n + j, sums[j], t); }
  }
{% endif %}
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let count = CTL[1];
  let t0 = group.y * TM;
  let n0 = group.x * TN;
  let tm = li / SIDE;
  let tn = li % SIDE;
  {% for a in range(quads) %}
  {% for i in range(4) %}
  {% for b in range(quads) %}
  var c{{ a }}{{ i }}{{ b }} = vec4<f32>();  // of token i of quad a the rows of quad b
  {% endfor %}
  {% endfor %}
  {% endfor %}
  for (var k0 = 0u; k0 < K; k0 += TK) {
    for (var i = li; i < TK * TM / 4u; i += THREADS) {
      let k = k0 + i % TK;
      let m = i / TK;
      var v = vec4<f32>();
      if (k < K) {
        let at = (t0 + 4u * m) * {{ stride }}u + {{ offset }}u + k;
        {% for j in range(4) %}
        if (t0 + 4u * m + {{ j }}u < count) { v[{{ j }}] = X[at + {{ j * stride }}u]; }
        {% endfor %}
        {% if gain is not none %}
        v *= p({{ gain }}u + k);
        {% endif %}
      }
      xs[(i % TK) * (TM / 4u) + m] = v;
    }
    for (var i = li; i < TN * TK / {{ values }}u; i += THREADS) {
      let part = i % (TK / {{ values }}u);
      let n = i / (TK / {{ values }}u);
      let b = k0 / {{ values }}u + part;
      let r = row_of(n0 + n);
      var scale = select(0.0, 1.0, n0 + n < N && b < KB);
      let block = r * KB + min(b, KB - 1u);
      let w = W[block];
      {% if format == "int8" %}
      scale *= S[r];
      {% elif format == "int4" %}
      scale *= scale_S(block);
      {% endif %}
      {% for i in range(values // 4) %}
      {
        let v = scale * {{ weights.part(format, "w", i) }};
        {% for j in range(4) %}
        ws[(part * {{ values }}u + {{ 4 * i + j }}u) * (TN / 4u) + n / 4u][n % 4u] = v[{{ j }}];
        {% endfor %}
      }
      {% endfor %}
    }
    workgroupBarrier();
    for (var k = 0u; k < TK; k++) {
      {% for a in range(quads) %}
      let x{{ a }} = xs[k * (TM / 4u) + tm + {{ a }}u * SIDE];
      let w{{ a }} = ws[k * (TN / 4u) + tn + {{ a }}u * SIDE];
      {% endfor %}
      {% for a in range(quads) %}
      {% for i in range(4) %}
      {% for b in range(quads) %}
      c{{ a }}{{ i }}{{ b }} += x{{ a }}[{{ i }}] * w{{ b }};
      {% endfor %}
      {% endfor %}
      {% endfor %}
    }
    workgroupBarrier();
  }
  {% for a in range(quads) %}
  {% for i in range(4) %}
  {% for b in range(quads) %}
  write(t0 + 4u * (tm + {{ a }}u * SIDE) + {{ i }}u, n0 + 4u * (tn + {{ b }}u * SIDE), c{{ a }}{{ i }}{{ b }}, count);
  {% endfor %}
  {% endfor %}
  {% endfor %}
}
