//! Loading, to a card where there is one, and to host memory that stands for one everywhere.

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use trellis_engine::model::ModelSource;

use super::convert::bytes_mut;
use super::*;
use crate::testing::{Random, gpu};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Host memory in a device's place. Like the device, it reads the buffer at any time until it was waited for: here
/// at the last moment.
struct HostLane<'a> {
    memory: &'a Mutex<Vec<u8>>,
    buffer: Vec<f32>,
    pending: Option<Slice>,
}

impl<'a> HostLane<'a> {
    fn new(memory: &'a Mutex<Vec<u8>>, n_bytes: usize) -> Self {
        Self { memory, buffer: vec![0.0; n_bytes.div_ceil(4)], pending: None }
    }
}

impl Lane for HostLane<'_> {
    fn ready(&mut self) -> Result<&mut [u8], CudaError> {
        let buffer = bytes_mut(&mut self.buffer);
        if let Some(Slice { address, n_bytes }) = self.pending.take() {
            let start = address as usize;
            let memory = &mut self.memory.lock().expect("no panic")[start..start + n_bytes];
            assert!(memory.iter().all(|byte| *byte == POISON), "{n_bytes} bytes at {start} are written once");
            memory.copy_from_slice(&buffer[..n_bytes]);
        }
        buffer.fill(0);
        Ok(buffer)
    }

    fn send(&mut self, destination: Slice) -> Result<(), CudaError> {
        assert!(destination.n_bytes <= size_of_val(&self.buffer[..]));
        assert!(self.pending.replace(destination).is_none(), "one copy at a time");
        Ok(())
    }
}

/// No weight of the tests has these bytes throughout.
const POISON: u8 = 0xa5;

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let bytes = values.iter().map(|&value| match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    });
    bytes.flatten().collect()
}

/// A safetensors file of one-dimensional tensors, given in the order in which they lie.
fn write(folder: &Path, tensors: &[(&str, Dtype, &[f32])]) -> Checkpoint {
    let (mut fields, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, values) in tensors {
        let start = data.len();
        data.extend(bytes_of(*dtype, values));
        let (dtype, n, end) = (dtype.name().to_uppercase(), values.len(), data.len());
        fields
            .push(format!(r#""{name}":{{"dtype":"{dtype}","shape":[{n}],"data_offsets":[{start},{end}]}}"#));
    }
    let header = format!("{{{}}}", fields.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    fs::write(folder.join("model.safetensors"), file).expect("the file is written");
    Checkpoint::open(&ModelSource::Folder(folder.to_owned())).expect("a checkpoint")
}

/// The model that comes with the program: beside this crate, or below the folder that a packed test is run in.
fn tiny() -> Checkpoint {
    let folders = [concat!(env!("CARGO_MANIFEST_DIR"), "/../daemon/models/tiny"), "daemon/models/tiny"];
    let folder = folders.iter().map(PathBuf::from).find(|folder| folder.is_dir()).expect("the bundled model");
    Checkpoint::open(&ModelSource::Folder(folder)).expect("a checkpoint")
}

/// All tensors, one behind the other in the order of their names, with a gap between them.
pub(super) fn places(checkpoint: &Checkpoint, dtype: Dtype, address: u64) -> (Vec<Part>, usize) {
    let mut end = 0;
    let mut parts = Vec::new();
    for (name, info) in checkpoint.tensors() {
        let n_bytes = info.n_elements() * dtype.n_bytes();
        let destination = Slice { address: address + end as u64, n_bytes };
        parts.push(Part { tensor: name.to_owned(), destination });
        end = (end + n_bytes + 1).next_multiple_of(512);
    }
    (parts, end)
}

/// What a tensor is in another type, element by element.
fn expected(checkpoint: &Checkpoint, tensor: &str, dtype: Dtype) -> Vec<u8> {
    let info = checkpoint.tensor(tensor).expect("it is there");
    let mut values = vec![0.0; info.n_elements()];
    checkpoint.read_f32(tensor, &mut values).expect("it can be read");
    bytes_of(dtype, &values)
}

pub(super) fn silent(_done: u64, _total: u64) {}

/// Loads into host memory and compares every byte, those between the tensors as well.
fn check(checkpoint: &Checkpoint, dtype: Dtype, sizes: Sizes) {
    let (parts, n_bytes) = places(checkpoint, dtype, 0);
    let memory = Mutex::new(vec![POISON; n_bytes]);
    let open = || Ok((0..sizes.n_buffers).map(|_| HostLane::new(&memory, sizes.buffer_bytes)).collect());
    copy(checkpoint, dtype, &parts, sizes, open, &|| false, &silent).expect("it loads");
    let mut wanted = vec![POISON; n_bytes];
    for part in &parts {
        let Slice { address, n_bytes } = part.destination;
        let start = address as usize;
        wanted[start..start + n_bytes].copy_from_slice(&expected(checkpoint, &part.tensor, dtype));
    }
    assert!(memory.into_inner().expect("no panic") == wanted, "{dtype:?}, {sizes:?}");
}

#[test]
fn every_tensor_arrives_in_every_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut random = Random(31);
    let mut values = [70_000, 1, 4096, 33].map(|n| random.normals(n));
    // Rounded to nothing, to the least of a type, and to the next even one.
    values[2][..4].copy_from_slice(&[1e-9, 6e-8, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]);
    for stored in DTYPES {
        let names = ["d", "b", "c", "a"];
        let tensors: Vec<_> = (0..4).map(|idx| (names[idx], stored, &values[idx][..])).collect();
        let checkpoint = write(folder.path(), &tensors);
        for dtype in DTYPES {
            for (n_workers, n_buffers, buffer_bytes) in [(1, 2, 1 << 20), (3, 3, 4096), (5, 1, 1000)] {
                check(&checkpoint, dtype, Sizes { n_workers, n_buffers, buffer_bytes });
            }
        }
    }
}

#[test]
fn the_bundled_model_arrives() {
    for dtype in DTYPES {
        check(&tiny(), dtype, Sizes { n_workers: 2, n_buffers: 3, buffer_bytes: 100_000 });
    }
}

#[test]
fn files_are_read_from_front_to_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = write(folder.path(), &[("b", Dtype::F32, &[1.0; 5]), ("a", Dtype::F32, &[2.0; 3])]);
    let (parts, _) = places(&checkpoint, Dtype::Bf16, 0);
    let ranges = cut(&checkpoint, Dtype::Bf16, &parts, 4).expect("the tensors are there");
    let found: Vec<_> = ranges
        .iter()
        .map(|range| (parts[range.part_idx].tensor.as_str(), range.start, range.n_elements))
        .collect();
    assert_eq!(found, [("b", 0, 2), ("b", 2, 2), ("b", 4, 1), ("a", 0, 2), ("a", 2, 1)]);
}

#[test]
fn progress_only_grows_and_ends_with_all() {
    let checkpoint = tiny();
    let (parts, n_bytes) = places(&checkpoint, Dtype::F32, 0);
    let total: u64 = parts.iter().map(|part| part.destination.n_bytes as u64).sum();
    let memory = Mutex::new(vec![POISON; n_bytes]);
    let sizes = Sizes { n_workers: 3, n_buffers: 2, buffer_bytes: 5000 };
    let (heard, caller) = (Mutex::new(Vec::new()), thread::current().id());
    let hear = |done, of| {
        assert_eq!((thread::current().id(), of), (caller, total));
        heard.lock().expect("no panic").push(done);
    };
    let open = || Ok((0..sizes.n_buffers).map(|_| HostLane::new(&memory, sizes.buffer_bytes)).collect());
    copy(&checkpoint, Dtype::F32, &parts, sizes, open, &|| false, &hear).expect("it loads");
    let heard = heard.into_inner().expect("no panic");
    assert_eq!((heard[0], heard[heard.len() - 1]), (0, total));
    assert!(heard.is_sorted_by(|a, b| a < b), "{heard:?}");
    assert!((50..=N_REPORTS as usize + 1).contains(&heard.len()), "{} calls", heard.len());
}

#[test]
fn what_shares_the_link_now_and_then_arrives_as_well() {
    let checkpoint = tiny();
    let (parts, n_bytes) = places(&checkpoint, Dtype::Bf16, 0);
    let memory = Mutex::new(vec![POISON; n_bytes]);
    let sizes = Sizes { n_workers: 4, n_buffers: 3, buffer_bytes: 50_000 };
    let open = || Ok((0..sizes.n_buffers).map(|_| HostLane::new(&memory, sizes.buffer_bytes)).collect());
    let n_asked = AtomicUsize::new(0);
    let is_shared = || n_asked.fetch_add(1, Ordering::Relaxed) % 7 < 5;
    copy(&checkpoint, Dtype::Bf16, &parts, sizes, open, &is_shared, &silent).expect("it loads");
    let memory = memory.into_inner().expect("no panic");
    for part in &parts {
        let start = part.destination.address as usize;
        let found = &memory[start..start + part.destination.n_bytes];
        assert!(found == expected(&checkpoint, &part.tensor, Dtype::Bf16), "{}", part.tensor);
    }
}

#[test]
fn nothing_is_loaded_without_work() {
    let none = || -> Result<Vec<HostLane<'_>>, CudaError> { panic!("no buffer is needed") };
    let sizes = Sizes { n_workers: 0, n_buffers: 2, buffer_bytes: 0 };
    copy(&tiny(), Dtype::F32, &[], sizes, none, &|| false, &silent).expect("nothing to do");
}

#[test]
fn a_missing_tensor_is_named() {
    let part = Part { tensor: "model.nothing".into(), destination: Slice { address: 0, n_bytes: 4 } };
    match cut(&tiny(), Dtype::F32, &[part], 4096) {
        Err(ModelError::UnknownTensor { tensor, .. }) => assert_eq!(tensor, "model.nothing"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_ends_early_stops_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = write(folder.path(), &[("a", Dtype::F32, &[1.0; 100_000])]);
    let file =
        fs::File::options().write(true).open(folder.path().join("model.safetensors")).expect("the file");
    file.set_len(200_000).expect("it can be cut");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (parts, n_bytes) = places(&checkpoint, dtype, 0);
        let memory = Mutex::new(vec![POISON; n_bytes]);
        let sizes = Sizes { n_workers: 2, n_buffers: 2, buffer_bytes: 1000 };
        let open = || Ok((0..sizes.n_buffers).map(|_| HostLane::new(&memory, sizes.buffer_bytes)).collect());
        let outcome = copy(&checkpoint, dtype, &parts, sizes, open, &|| false, &silent);
        assert!(matches!(outcome, Err(LoadError::Model(ModelError::Io { .. }))), "{outcome:?}");
        let memory = memory.into_inner().expect("no panic");
        let n_after = memory[n_bytes * 3 / 4..].iter().filter(|byte| **byte != POISON).count();
        assert_eq!(n_after, 0, "nothing is read after the end of the file");
    }
}

/// Fails after some copies.
struct FailingLane<'a>(HostLane<'a>, &'a AtomicUsize);

impl Lane for FailingLane<'_> {
    fn ready(&mut self) -> Result<&mut [u8], CudaError> {
        self.0.ready()
    }

    fn send(&mut self, destination: Slice) -> Result<(), CudaError> {
        if self.1.fetch_add(1, Ordering::Relaxed) == 10 {
            return Err(CudaError::Call { call: "a copy", code: None, reason: "a test".into() });
        }
        self.0.send(destination)
    }
}

#[test]
fn a_failure_of_the_device_stops_all() {
    let checkpoint = tiny();
    let (parts, n_bytes) = places(&checkpoint, Dtype::Bf16, 0);
    let (memory, n_copies) = (Mutex::new(vec![POISON; n_bytes]), AtomicUsize::new(0));
    let sizes = Sizes { n_workers: 2, n_buffers: 2, buffer_bytes: 1000 };
    let lane = || FailingLane(HostLane::new(&memory, sizes.buffer_bytes), &n_copies);
    let open = || Ok((0..sizes.n_buffers).map(|_| lane()).collect());
    let outcome = copy(&checkpoint, Dtype::Bf16, &parts, sizes, open, &|| false, &silent);
    assert!(matches!(outcome, Err(LoadError::Cuda(CudaError::Call { call: "a copy", .. }))), "{outcome:?}");
    // Thousands are left. The other worker is stopped, however late it hears of it.
    let n_ranges = cut(&checkpoint, Dtype::Bf16, &parts, sizes.buffer_bytes).expect("all there").len();
    assert!(n_copies.into_inner() < n_ranges, "all {n_ranges} copies were tried");
}

#[test]
fn the_card_holds_the_bundled_model_in_every_type() {
    let Some(test) = gpu() else { return };
    let checkpoint = tiny();
    for dtype in DTYPES {
        let (_, n_bytes) = places(&checkpoint, dtype, 0);
        let buffer = test.gpu.allocate("a test", n_bytes).expect("device memory");
        buffer.slice().fill(&test.stream, POISON).expect("filled");
        // Other streams do not wait for this one.
        test.stream.synchronize().expect("filled");
        let (parts, _) = places(&checkpoint, dtype, buffer.slice().address);
        load(&test.gpu, &checkpoint, dtype, &parts, &|| false, &silent).expect("it loads");
        for part in &parts {
            let mut found = vec![0u8; part.destination.n_bytes];
            part.destination.download(&test.stream, &mut found).expect("it comes back");
            assert!(found == expected(&checkpoint, &part.tensor, dtype), "{} as {dtype:?}", part.tensor);
        }
    }
}
