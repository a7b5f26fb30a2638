//! How fast weights come from the page cache to a card, and what bounds it: reading alone, copying alone, both together.

use std::fs;
use std::path::Path;
use std::time::Instant;

use trellis_engine::model::ModelSource;

use super::convert::bytes_mut;
use super::tests::{places, silent};
use super::*;
use crate::testing::{Random, TestGpu, gpu};

const N_TENSORS: usize = 128;
const TENSOR_BYTES: usize = 128 << 20;
const N_BYTES: usize = N_TENSORS * TENSOR_BYTES;

/// Settings are measured by turns: neighbours on the machine's memory come and go.
const N_ROUNDS: usize = 3;

/// No tensor is made of it.
const POISON: u8 = 0xa5;

/// A file of bf16 tensors that no compression could shorten.
fn write_checkpoint(folder: &Path) -> Checkpoint {
    let fields: Vec<_> = (0..N_TENSORS)
        .map(|idx| {
            let (start, end) = (idx * TENSOR_BYTES, (idx + 1) * TENSOR_BYTES);
            let n = TENSOR_BYTES / 2;
            format!(r#""t{idx:03}":{{"dtype":"BF16","shape":[{n}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", fields.join(","));
    let mut file = fs::File::create(folder.join("model.safetensors")).expect("a file");
    let mut put = |bytes: &[u8]| std::io::Write::write_all(&mut file, bytes).expect("there is room");
    put(&(header.len() as u64).to_le_bytes());
    put(header.as_bytes());
    let mut random = Random(32);
    let mut numbers = vec![0u64; TENSOR_BYTES / 8];
    numbers.iter_mut().for_each(|number| *number = random.next());
    for idx in 0..N_TENSORS {
        numbers[idx] = idx as u64;
        put(bytes_mut(&mut numbers));
    }
    Checkpoint::open(&ModelSource::Folder(folder.to_owned())).expect("a checkpoint")
}

/// Bytes a second of one large pinned copy: what no way of loading can beat.
fn link_rate(test: &TestGpu, destination: Slice) -> f64 {
    let source = test.gpu.pinned::<u8>(256 << 20).expect("pinned memory");
    let rates = (0..5).map(|_| {
        rate(source.len(), || {
            destination.upload(&test.stream, &source).expect("a copy");
            test.stream.synchronize().expect("a copy");
        })
    });
    rates.fold(0.0, f64::max)
}

fn rate(n_bytes: usize, work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    n_bytes as f64 / begun.elapsed().as_secs_f64()
}

/// A pinned buffer whose bytes go nowhere: what reading takes by itself.
struct ReadOnly<'a>(&'a mut [u8]);

impl Lane for ReadOnly<'_> {
    fn ready(&mut self) -> Result<&mut [u8], CudaError> {
        Ok(self.0)
    }

    fn send(&mut self, _destination: Slice) -> Result<(), CudaError> {
        Ok(())
    }
}

/// Reads the whole checkpoint into the pinned buffers of a load.
fn read_alone(test: &TestGpu, checkpoint: &Checkpoint, parts: &[Part], sizes: Sizes) {
    let n_buffers = sizes.n_workers * sizes.n_buffers;
    let mut staging = test.gpu.pinned_unset(n_buffers * sizes.buffer_bytes).expect("pinned memory");
    let free = Mutex::new(staging.chunks_exact_mut(sizes.buffer_bytes).collect::<Vec<_>>());
    let open = || {
        let mut free = free.lock().expect("no panic");
        let n_others = free.len() - sizes.n_buffers;
        Ok(free.split_off(n_others).into_iter().map(ReadOnly).collect())
    };
    copy(checkpoint, Dtype::Bf16, parts, sizes, open, &|| false, &silent).expect("it is read");
}

/// Copies as many bytes out of the pinned buffers of a load, which nothing fills.
fn copy_alone(test: &TestGpu, destination: Slice, sizes: Sizes) {
    let n_bytes = sizes.n_workers * sizes.n_buffers * sizes.buffer_bytes;
    let staging = test.gpu.pinned::<u8>(n_bytes).expect("pinned memory");
    let streams: Vec<_> = (0..sizes.n_workers).map(|_| test.gpu.stream().expect("a stream")).collect();
    for (idx, start) in (0..N_BYTES).step_by(sizes.buffer_bytes).enumerate() {
        let from = idx * sizes.buffer_bytes % n_bytes;
        let (to, buffer) =
            (destination.part(start, sizes.buffer_bytes), &staging[from..][..sizes.buffer_bytes]);
        to.upload(&streams[idx % streams.len()], buffer).expect("a copy");
    }
    streams.iter().for_each(|stream| stream.synchronize().expect("copied"));
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

#[test]
#[ignore = "writes 16 GiB of temporary files and measures"]
fn the_rate_of_loading() {
    let Some(test) = gpu() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = write_checkpoint(folder.path());
    let (_, n_bytes) = places(&checkpoint, Dtype::Bf16, 0);
    let buffer = test.gpu.allocate("a test", n_bytes).expect("device memory");
    let (parts, _) = places(&checkpoint, Dtype::Bf16, buffer.slice().address);
    let link = link_rate(&test, buffer.slice());
    println!("{}: link {:.1} GB/s", test.gpu.name(), link / 1e9);
    let sizes = |n_workers, n_buffers, buffer_kib: usize| Sizes {
        n_workers,
        n_buffers,
        buffer_bytes: buffer_kib << 10,
    };
    let settings = [MOST, sizes(8, 4, 1024), sizes(12, 3, 1024), sizes(8, 2, 4096), sizes(14, 2, 1024)];
    let (mut found, mut wanted) = (vec![0u64; TENSOR_BYTES / 8], vec![0u64; TENSOR_BYTES / 8]);
    let mut rates = settings.map(|_| [const { Vec::new() }; 3]);
    for _ in 0..N_ROUNDS {
        for (&sizes, [read, copied, loaded]) in settings.iter().zip(&mut rates) {
            buffer.slice().fill(&test.stream, POISON).expect("filled");
            test.stream.synchronize().expect("filled");
            loaded.push(rate(N_BYTES, || {
                load_with(&test.gpu, &checkpoint, Dtype::Bf16, &parts, sizes, &|| false, &silent)
                    .expect("it loads");
            }));
            for part in [&parts[0], &parts[N_TENSORS - 1]] {
                part.destination.download(&test.stream, &mut found).expect("it comes back");
                checkpoint.read_bytes(&part.tensor, bytes_mut(&mut wanted)).expect("it can be read");
                assert!(found == wanted, "{}", part.tensor);
            }
            read.push(rate(N_BYTES, || read_alone(&test, &checkpoint, &parts, sizes)));
            copied.push(rate(N_BYTES, || copy_alone(&test, buffer.slice(), sizes)));
        }
    }
    for (sizes, rates) in settings.iter().zip(&mut rates) {
        let [read, copied, loaded] = rates.each_mut().map(|rates| median(rates));
        println!(
            "{sizes:?}: {:.1} GB/s, {:.0}% of the link; reading alone {:.1}, copying alone {:.1} GB/s",
            loaded / 1e9,
            100.0 * loaded / link,
            read / 1e9,
            copied / 1e9
        );
    }
}
