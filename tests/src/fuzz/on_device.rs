//! Logit programs on a CUDA device, beside the processor: the kept inputs of the target `programs`, and what a simple mutator makes of
//! them. No fuzzer is linked, so that the program that does this runs wherever there is a device.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use trellis_cuda::fuzzing::{ProgramDevice, ProgramRow};
use trellis_oracles::{TARGETS, mutated_input, programs};

use super::tools::folder;

/// The target whose inputs are run.
pub const TARGET: &str = "programs";

/// Rows of one launch.
const N_ROWS: usize = 64;

/// How often progress is told.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// What is to be run.
#[derive(Debug)]
pub struct DevicePlan {
    /// Folders of inputs; those that are kept in the checkout when there are none.
    pub corpora: Vec<PathBuf>,
    /// How long inputs are made once all that are kept were run.
    pub time: Duration,
    /// Of what is made by chance.
    pub seed: u64,
}

/// Why nothing was run.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no device.
    #[error("no CUDA device: {0}")]
    NoDevice(#[from] trellis_cuda::CudaError),
    /// Inputs cannot be read, or one that failed cannot be written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No input is kept.
    #[error("there are no inputs in {0}")]
    NoInputs(String),
}

/// What was run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Inputs.
    pub n_inputs: u64,
    /// Those that were compared on the device.
    pub n_compared: u64,
    /// Programs that no device runs: those that end in a row, or are larger than devices take.
    pub n_refused: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_inputs, n_compared, n_refused } = self;
        write!(
            f,
            "{n_inputs} inputs, {n_compared} programs compared on the device and the processor, {n_refused} that devices do not run"
        )
    }
}

/// An input for which the device gives something else than the processor.
#[derive(Debug)]
pub struct Difference {
    /// The file that it was written to.
    pub input: PathBuf,
    /// How the answers differ.
    pub about: String,
}

/// Rows that wait to be run, with their inputs, by the size of their vocabulary.
type Waiting = BTreeMap<usize, Vec<(Vec<u8>, ProgramRow)>>;

struct Run {
    device: ProgramDevice,
    waiting: Waiting,
    counts: Counts,
}

/// Runs all that is kept, and then what is made of it for so long; ends with the first difference.
///
/// # Errors
/// There is no device, or no input.
///
/// # Panics
/// The interpreter and the definition disagree on the processor, or the device fails.
pub fn run(plan: &DevicePlan) -> Result<(Counts, Option<Difference>), DeviceError> {
    let corpora = match plan.corpora.is_empty() {
        true => ["corpus", "regressions"].map(|kind| folder().join(kind).join(TARGET)).to_vec(),
        false => plan.corpora.clone(),
    };
    let mut kept = Vec::new();
    for folder in corpora.iter().filter(|folder| !plan.corpora.is_empty() || folder.is_dir()) {
        kept.extend(read(folder)?);
    }
    if kept.is_empty() {
        let names: Vec<String> = corpora.iter().map(|folder| folder.display().to_string()).collect();
        return Err(DeviceError::NoInputs(names.join(", ")));
    }
    let device = ProgramDevice::open()?;
    let mut run = Run { device, waiting: Waiting::new(), counts: Counts::default() };
    println!("{} kept inputs; what is made by chance is of seed {}", kept.len(), plan.seed);
    for input in &kept {
        if let Some(difference) = run.input(input.clone())? {
            return Ok((run.counts, Some(difference)));
        }
    }
    let target = TARGETS.iter().find(|target| target.name == TARGET).expect("it is a target");
    let (begun, mut seed, mut next_told) = (Instant::now(), plan.seed, TOLD_EVERY);
    while begun.elapsed() < plan.time {
        seed = seed.wrapping_add(1);
        let input = mutated_input(&kept, seed, target.input_bytes_max);
        if let Some(difference) = run.input(input)? {
            return Ok((run.counts, Some(difference)));
        }
        if begun.elapsed() >= next_told {
            next_told += TOLD_EVERY;
            println!("{:>3} min  {}", begun.elapsed().as_secs() / 60, run.counts);
        }
    }
    let left: Vec<usize> = run.waiting.keys().copied().collect();
    for vocab_size in left {
        if let Some(difference) = run.launch(vocab_size)? {
            return Ok((run.counts, Some(difference)));
        }
    }
    Ok((run.counts, None))
}

impl Run {
    /// Has the processor check an input, and puts it to those that wait for a launch.
    fn input(&mut self, input: Vec<u8>) -> Result<Option<Difference>, DeviceError> {
        self.counts.n_inputs += 1;
        programs::check(&input);
        let row = programs::given(&input, |program, inputs| {
            (inputs.logits.len(), ProgramRow::new(program, inputs).ok())
        });
        let Some((vocab_size, row)) = row else { return Ok(None) };
        let Some(row) = row else {
            self.counts.n_refused += 1;
            return Ok(None);
        };
        let waiting = self.waiting.entry(vocab_size).or_default();
        waiting.push((input, row));
        match waiting.len() < N_ROWS {
            true => Ok(None),
            false => self.launch(vocab_size),
        }
    }

    /// Runs what waits of this vocabulary.
    fn launch(&mut self, vocab_size: usize) -> Result<Option<Difference>, DeviceError> {
        let (inputs, rows): (Vec<Vec<u8>>, Vec<ProgramRow>) =
            self.waiting.remove(&vocab_size).unwrap_or_default().into_iter().unzip();
        if rows.is_empty() {
            return Ok(None);
        }
        self.counts.n_compared += rows.len() as u64;
        let differences = self.device.differences(&rows, vocab_size);
        let found = inputs.into_iter().zip(differences).find_map(|(input, about)| Some((input, about?)));
        let Some((input, about)) = found else { return Ok(None) };
        let name = format!("difference-{}", &blake3::hash(&input).to_hex()[..16]);
        let path = std::env::current_dir().unwrap_or_default().join(name);
        fs::write(&path, &input).map_err(|source| DeviceError::File { path: path.clone(), source })?;
        Ok(Some(Difference { input: path, about }))
    }
}

/// The files of a folder, in the order of their names.
fn read(folder: &Path) -> Result<Vec<Vec<u8>>, DeviceError> {
    let failed = |source| DeviceError::File { path: folder.to_owned(), source };
    let entries = fs::read_dir(folder).map_err(failed)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>().map_err(failed)?;
    paths.sort();
    paths.iter().map(|path| fs::read(path).map_err(failed)).collect()
}
