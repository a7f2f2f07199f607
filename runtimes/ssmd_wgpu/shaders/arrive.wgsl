{# How workgroups of a dispatch go on from what all of them wrote to a coherent buffer: the last to arrive does, the others end
   and none waits. #}
@group(0) @binding({{ count_at }}) var<storage, read_write> COUNT: array<atomic<u32>>;  // arrivals; zero between dispatches

var<workgroup> arrived: u32;

fn arrives_last(li: u32, counter: u32, count: u32) -> bool {  // of `count` workgroups
  storageBarrier();  // what this one wrote comes before its arrival
  if (li == 0u) { arrived = atomicAdd(&COUNT[counter], 1u); }
  if (workgroupUniformLoad(&arrived) + 1u < count) { return false; }
  storageBarrier();  // what the others wrote, before what is read now
  if (li == 0u) { atomicStore(&COUNT[counter], 0u); }
  return true;
}
