// 1 / rms of each token's row: what the products after it multiply with.
const K = {{ columns }}u;
@group(0) @binding(0) var<storage, read> X: array<f32>;  // (T, K)
@group(0) @binding(1) var<storage, read_write> R: array<f32>;  // (T)

var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  var sum = 0.0;
  for (var k = li; k < K; k += 64u) {
    let x = X[group.y * K + k];
    sum += x * x;
  }
  sums[li] = sum;
  workgroupBarrier();
  if (li == 0u) {
    sum = 0.0;
    for (var i = 0u; i < 64u; i++) { sum += sums[i]; }
    R[group.y] = inverseSqrt(sum / f32(K) + {{ eps }});
  }
}
