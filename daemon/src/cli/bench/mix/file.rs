//! A mix as its file describes it.

use std::collections::BTreeSet;
use std::time::Duration;

use toml::Table;

use super::error::MixError;
use super::fields::Fields;
use super::load::{Kind, Load};
use crate::nearest::hint;

/// What is measured when the file does not say.
const WARM_UP: Duration = Duration::from_secs(2);
const MEASURE: Duration = Duration::from_secs(10);
const N_WINDOWS: usize = 9;

/// Loads, and which of them run together for how long.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mix {
    /// What it shows, in a sentence.
    pub(super) about: String,
    pub(super) warm_up: Duration,
    pub(super) measure: Duration,
    /// Equal parts of the measured time; rates are medians over them.
    pub(super) n_windows: usize,
    /// Settings of the engine; the daemon's own where absent.
    pub(super) step_rows: Option<usize>,
    pub(super) step_tokens: Option<usize>,
    pub(super) latency_multiple: Option<f64>,
    pub(super) loads: Vec<Load>,
    pub(super) phases: Vec<Phase>,
}

/// Loads that run at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Phase {
    pub(super) name: String,
    /// Places in [`Mix::loads`].
    pub(super) loads: Vec<usize>,
}

impl Mix {
    /// Reads a file's text.
    ///
    /// # Errors
    /// The first thing that is wrong in it.
    pub(super) fn parse(text: &str) -> Result<Self, MixError> {
        let table: Table = text.parse().map_err(|source| MixError::Parse { source: Box::new(source) })?;
        let mut file = Fields::new("the file", &table);
        let about = file.text("about")?.unwrap_or_default().to_owned();
        let warm_up = file.seconds("warm_up_s")?.unwrap_or(WARM_UP);
        let measure = file.seconds("measure_s")?.unwrap_or(MEASURE);
        let n_windows = file.count("windows", 1..=1000)?.unwrap_or(N_WINDOWS);
        let (alone, together) = (file.flag("alone")?, file.flag("together")?);
        let (mut step_rows, mut step_tokens, mut latency_multiple) = (None, None, None);
        if let Some(mut engine) = file.table("engine")? {
            step_rows = engine.count("step_rows", 1..=4096)?;
            step_tokens = engine.count("step_tokens", 2..=1 << 20)?;
            latency_multiple = engine.number("latency_multiple")?;
            engine.finish()?;
        }
        let tables = file.tables("load")?;
        let loads: Vec<Load> = tables.into_iter().map(Load::read).collect::<Result<_, _>>()?;
        let phases = file.tables("phase")?;
        file.finish()?;
        check_names(&loads)?;
        check_models(&loads)?;
        let phases = match (phases.is_empty(), alone, together) {
            (true, ..) => usual_phases(&loads, alone.unwrap_or(true), together.unwrap_or(true))?,
            (false, Some(_), _) => return Err(MixError::PhasesTwice { field: "alone" }),
            (false, _, Some(_)) => return Err(MixError::PhasesTwice { field: "together" }),
            (false, None, None) => {
                phases.into_iter().map(|phase| read_phase(phase, &loads)).collect::<Result<_, _>>()?
            }
        };
        Ok(Self {
            about,
            warm_up,
            measure,
            n_windows,
            step_rows,
            step_tokens,
            latency_multiple,
            loads,
            phases,
        })
    }

    /// Contexts that decode at once, at most.
    pub(super) fn n_rows(&self) -> usize {
        let rows = |phase: &Phase| phase.loads.iter().map(|&idx| self.loads[idx].n_rows()).sum();
        self.phases.iter().map(rows).max().unwrap_or(0)
    }

    /// Whether a load draws by logit programs.
    pub(super) fn has_programs(&self) -> bool {
        self.loads.iter().any(Load::has_program)
    }

    /// The second model that its loads need.
    pub(super) fn second(&self) -> Option<&str> {
        self.loads.iter().find_map(Load::second)
    }

    /// Guests that run at once, at most.
    pub(super) fn n_guests(&self) -> usize {
        let guests = |phase: &Phase| phase.loads.iter().map(|&idx| self.loads[idx].n_guests()).sum();
        self.phases.iter().map(guests).max().unwrap_or(0)
    }
}

fn check_names(loads: &[Load]) -> Result<(), MixError> {
    if loads.is_empty() {
        return Err(MixError::NoLoads);
    }
    let mut names = BTreeSet::new();
    for load in loads {
        if !names.insert(&load.name) {
            return Err(MixError::SameName { name: load.name.clone() });
        }
        if let Some(name) = &load.against {
            find(loads, &format!("load {:?}, against", load.name), name)?;
        }
    }
    Ok(())
}

/// That no more than two models are needed at once.
fn check_models(loads: &[Load]) -> Result<(), MixError> {
    let of_loads = loads.iter().filter_map(|load| match &load.kind {
        Kind::Loads(of) => Some(of.model.as_str()),
        _ => None,
    });
    let mut seconds = loads.iter().filter_map(Load::second);
    let Some(first) = seconds.next() else { return Ok(()) };
    match of_loads.chain(seconds.filter(|&other| other != first)).next() {
        Some(other) => Err(MixError::ThreeModels { second: first.to_owned(), other: other.to_owned() }),
        None => Ok(()),
    }
}

fn find(loads: &[Load], place: &str, name: &str) -> Result<usize, MixError> {
    loads.iter().position(|load| load.name == name).ok_or_else(|| MixError::UnknownLoad {
        place: place.to_owned(),
        name: name.to_owned(),
        hint: hint(name, loads.iter().map(|load| load.name.as_str())),
    })
}

/// Each load alone, then all of them.
fn usual_phases(loads: &[Load], alone: bool, together: bool) -> Result<Vec<Phase>, MixError> {
    let mut phases = Vec::new();
    if alone {
        phases.extend(
            loads
                .iter()
                .enumerate()
                .map(|(idx, load)| Phase { name: format!("{} alone", load.name), loads: vec![idx] }),
        );
    }
    if together && (loads.len() > 1 || !alone) {
        phases.push(Phase { name: "together".to_owned(), loads: (0..loads.len()).collect() });
    }
    if phases.is_empty() { Err(MixError::NothingMeasured) } else { Ok(phases) }
}

fn read_phase(mut fields: Fields<'_>, loads: &[Load]) -> Result<Phase, MixError> {
    let name = fields.text("name")?;
    let names = fields.texts("loads")?;
    let names = fields.required("loads", names)?;
    let mut places = Vec::new();
    for name in &names {
        let idx = find(loads, fields.place(), name)?;
        if places.contains(&idx) {
            return Err(MixError::LoadTwice { place: fields.place().to_owned(), name: (*name).to_owned() });
        }
        places.push(idx);
    }
    if places.is_empty() {
        return Err(MixError::Missing { place: fields.place().to_owned(), key: "loads" });
    }
    let name = name.map_or_else(|| names.join(" + "), str::to_owned);
    fields.finish()?;
    Ok(Phase { name, loads: places })
}

impl Load {
    /// Whether it decodes without end: neither prompts nor models that come and go.
    pub(super) fn is_decoding(&self) -> bool {
        !matches!(self.kind, Kind::Prompts(_) | Kind::Loads(_))
    }

    /// Whether its tokens are counted where they are pulled; those of others are counted as the engine computes them.
    pub(super) fn is_pulled(&self) -> bool {
        self.is_decoding() && !matches!(self.kind, Kind::Beams(_))
    }
}

#[cfg(test)]
mod tests;
