{# Norms of queries and keys where the family has them, and RoPE (arXiv:2104.09864): of one head's `row`, which the threads of
   a workgroup share. Bindings from `at` on. #}
const D = {{ head_dim }}u;
const HALF = {{ rotated // 2 }}u;
{% if rotated %}
@group(0) @binding({{ at }}) var<storage, read> COS: array<f32>;  // (context, HALF)
@group(0) @binding({{ at + 1 }}) var<storage, read> SIN: array<f32>;  // (context, HALF)
{% endif %}

var<workgroup> row: array<f32, {{ head_dim }}>;
var<workgroup> squares: array<f32, 64>;

fn turned(i: u32, position: u32) -> f32 {
{% if rotated %}
  if (i < HALF) { return row[i] * COS[position * HALF + i] - row[i + HALF] * SIN[position * HALF + i]; }
  if (i < 2u * HALF) {
    let j = i - HALF;
    return row[i] * COS[position * HALF + j] + row[j] * SIN[position * HALF + j];
  }
{% endif %}
  return row[i];
}
{% if qk_eps is not none %}

fn norm(li: u32, gain: u32) {  // of `row`; 64 sums however many threads there are: the same bits in a step and a prefill
  if (li < 64u) {
    var part = 0.0;
    for (var i = li; i < D; i += 64u) { part += row[i] * row[i]; }
    squares[li] = part;
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < {{ [64, head_dim] | min }}u; i++) { sum += squares[i]; }
  let rms = inverseSqrt(sum / f32(D) + {{ qk_eps }});
  for (var i = li; i < D; i += {{ threads }}u) { row[i] *= rms * p(gain + i); }
  workgroupBarrier();
}
{% endif %}
{% if half %}

fn packed(x: f32, y: f32) -> u32 {  // rounding must not overflow to infinity
  return pack2x16float(clamp(vec2<f32>(x, y), vec2<f32>(-65504.0), vec2<f32>(65504.0)));
}
{% endif %}
