// X += the sum of what the chosen experts of each token put out, by their shares and in their order.
const K = {{ columns }}u;
const CHOSEN = {{ chosen }}u;
@group(0) @binding(0) var<storage, read> Y: array<f32>;  // (T, CHOSEN, K)
@group(0) @binding(1) var<storage, read> SHARES: array<f32>;  // (T, CHOSEN)
@group(0) @binding(2) var<storage, read_write> X: array<f32>;  // (T, K)

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let c = group.x * 64u + li;
  if (c >= K) { return; }
  var sum = 0.0;
  for (var pair = group.y * CHOSEN; pair < group.y * CHOSEN + CHOSEN; pair++) {
    sum = fma(SHARES[pair], Y[pair * K + c], sum);
  }
  X[group.y * K + c] += sum;
}
