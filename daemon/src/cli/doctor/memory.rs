//! Whether the models of the settings fit together: their weights, and the KV of the longest context of each.

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::model::Model;

use super::finding::{Check, Code, Finding};
use super::socket::Daemon;
use crate::cli::output::bytes;
use crate::config::{Config, Device};
use crate::daemon::DaemonError;
use crate::device::Chosen;
use crate::loader::{N_POSITIONS_LEAST, is_evictable};
use crate::machine::{self, Bound};
use crate::shares::{Needs, divide};

/// Memory for models, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// With nothing else there.
    pub(super) total: u64,
    /// Now.
    pub(super) free: u64,
    pub(super) whose: Whose,
}

/// What holds the memory to what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Device,
    Machine,
    ControlGroup,
}

impl Room {
    /// That of the device.
    ///
    /// # Errors
    /// The device does not tell.
    pub(super) fn of(chosen: &Chosen) -> Result<Self, DaemonError> {
        let whose = match (chosen, machine::bound()) {
            (Chosen::Cuda { .. }, _) => Whose::Device,
            (Chosen::Cpu, Bound::Machine) => Whose::Machine,
            (Chosen::Cpu, Bound::ControlGroup) => Whose::ControlGroup,
        };
        Ok(Self { total: chosen.total_bytes(), free: chosen.capacity_bytes()?, whose })
    }
}

/// Looks whether the models of the start fit together, and each that is declared beside those that stay. What a daemon that runs
/// has taken is for them.
pub(super) fn check(
    (models, declared): (&[Model], &[Model]),
    config: &Config,
    chosen: &Chosen,
    room: Room,
    daemon: Daemon,
) -> Check {
    let mut check = Check::new("memory", "");
    let kv_bytes_max = config.kv_bytes.map_or(room.total, |kv_bytes| kv_bytes.min(room.total));
    let model_bytes = config.model_bytes.unwrap_or(u64::MAX);
    let allowed = Room { free: room.free.min(model_bytes), ..room };
    let mut needs = Vec::new();
    for model in models {
        match chosen.needs(model, config, kv_bytes_max) {
            Ok(of_model) => {
                let of_model = shortest(of_model, model, config, chosen, allowed);
                let (weights, kv) = (bytes(of_model.fixed_bytes), bytes(of_model.kv_bytes_min()));
                check.details.push(format!(
                    "{}: {weights} of weights and for steps, {kv} for the KV of a context",
                    model.name
                ));
                needs.push(of_model);
            }
            Err(error) => check.findings.push(unsupported(&error)),
        }
    }
    let (of_weights, of_kv) = sums(&needs);
    let needed = bytes(of_weights + of_kv);
    check.details.push(format!("{} in all for models, {} free", bytes(room.total), bytes(room.free)));
    check.said = match models {
        [] => format!("{} for models, of which none is loaded at the start", bytes(room.total)),
        _ => format!("the models need {needed}, of {} that there are", bytes(room.total)),
    };
    let free = if daemon == Daemon::Running { room.total } else { room.free };
    if let Some(kv_bytes) = config.kv_bytes.filter(|&kv_bytes| kv_bytes < of_kv) {
        let said = format!(
            "kv_bytes is {}, the longest context of each model needs {}",
            bytes(kv_bytes),
            bytes(of_kv)
        );
        check.findings.push(Finding::problem(
            Code::KvTooSmall,
            said,
            format!("set `kv_bytes = {of_kv}` or more"),
        ));
    } else if !fits(&needs, config, room.total) {
        let what = match room.whose {
            Whose::Device => "the device has",
            Whose::Machine => "the machine has",
            Whose::ControlGroup => "the control group of this process is held to",
        };
        let said = format!(
            "the models need {needed} ({} of weights and for steps, {} of KV); {what} {}",
            bytes(of_weights),
            bytes(of_kv),
            bytes(room.total)
        );
        check.findings.push(Finding::problem(Code::MemoryTooSmall, said, remedy(models, room.whose)));
    } else if !fits(&needs, config, model_bytes) {
        let said = format!("model_bytes is {}, the models need {needed}", bytes(model_bytes));
        let remedy = format!("set `model_bytes = {}` or more, or take fewer `models`", of_weights + of_kv);
        check.findings.push(Finding::problem(Code::ModelBytesTooSmall, said, remedy));
    } else if !fits(&needs, config, free) {
        let said = format!("the models need {needed}, and {} are free", bytes(room.free));
        let whose = match room.whose {
            Whose::Device => "`nvidia-smi` lists what has taken the rest: end it",
            Whose::Machine | Whose::ControlGroup => {
                "`ps aux --sort=-rss` lists what has taken the rest: end it"
            }
        };
        check.findings.push(Finding::problem(
            Code::MemoryTaken,
            said,
            format!("{whose}, or take fewer `models`"),
        ));
    }
    for model in declared {
        check_alone(model, (models, declared), config, (chosen, room), &mut check);
    }
    check
}

/// All others may make room for a model of the catalog but those that stay.
fn check_alone(
    model: &Model,
    (models, declared): (&[Model], &[Model]),
    config: &Config,
    (chosen, room): (&Chosen, Room),
    check: &mut Check,
) {
    let is_here = |model: &&Model| {
        let device = config.catalog.get(&model.name).and_then(|declared| declared.device);
        device.is_none_or(|device| device == Device::Auto || device.is_same(chosen.device()))
    };
    if !is_here(&model) {
        return;
    }
    let kv_bytes_max = config.kv_bytes.map_or(room.total, |kv_bytes| kv_bytes.min(room.total));
    let needs_of = |model: &Model| {
        let needs = chosen.needs(model, config, kv_bytes_max);
        needs.map(|needs| shortest(needs, model, config, chosen, room))
    };
    let own = match needs_of(model) {
        Ok(own) => own,
        Err(error) => return check.findings.push(unsupported(&error)),
    };
    let others = models.iter().chain(declared).filter(is_here);
    let staying = others.filter(|other| other.name != model.name && !is_evictable(&other.name, config));
    let mut needs: Vec<Needs> = staying.filter_map(|other| needs_of(other).ok()).collect();
    needs.push(own);
    let capacity = config.model_bytes.unwrap_or(u64::MAX).min(room.total);
    if !fits(&needs, config, capacity) {
        let said = format!(
            "{} needs {}, which is never free beside the models that stay: models may have {}",
            model.name,
            bytes(own.fixed_bytes.saturating_add(own.kv_bytes_min())),
            bytes(capacity)
        );
        let remedy = "take a smaller model, pin fewer, or raise `model_bytes` where it is set";
        check.findings.push(Finding::problem(Code::MemoryTooSmall, said, remedy));
    }
}

/// A context may be shorter than the model's longest where a device has no room for that, as when models are loaded.
fn shortest(needs: Needs, model: &Model, config: &Config, chosen: &Chosen, room: Room) -> Needs {
    let is_cut = config.kv_bytes.is_none() && matches!(chosen, Chosen::Cuda { .. });
    if !is_cut || fits(&[needs], config, room.free) {
        return needs;
    }
    Needs { n_pages_min: model.config.n_positions.min(N_POSITIONS_LEAST).div_ceil(PAGE_LEN), ..needs }
}

/// Of weights and for steps, and of KV.
fn sums(needs: &[Needs]) -> (u64, u64) {
    let of_weights = needs.iter().fold(0u64, |sum, needs| sum.saturating_add(needs.fixed_bytes));
    let of_kv = needs.iter().fold(0u64, |sum, needs| sum.saturating_add(needs.kv_bytes_min()));
    (of_weights, of_kv)
}

fn fits(needs: &[Needs], config: &Config, capacity: u64) -> bool {
    let Some(rest) = capacity.checked_sub(sums(needs).0) else { return false };
    divide(config.kv_bytes.map_or(rest, |kv_bytes| kv_bytes.min(rest)), needs).is_some()
}

fn remedy(models: &[Model], whose: Whose) -> String {
    let fewer = match models.len() {
        1 => "take a smaller model",
        _ => "take fewer or smaller `models`",
    };
    match whose {
        Whose::Device => format!("{fewer}, or store them as bf16: `dtype = \"bf16\"`"),
        Whose::Machine => format!("{fewer}, or a GPU: the CPU computes in f32"),
        Whose::ControlGroup => {
            format!("{fewer}, or raise the limit: `MemoryMax=` of the unit, `--memory` of the container")
        }
    }
}

fn unsupported(error: &DaemonError) -> Finding {
    let said = error.to_string();
    match error {
        DaemonError::CpuDtype { .. } => {
            Finding::problem(Code::DtypeNeedsGpu, said, "set `dtype = \"f32\"`, or leave it out")
        }
        DaemonError::KvTooSmall { needed_bytes, .. } => {
            Finding::problem(Code::KvTooSmall, said, format!("set `kv_bytes = {needed_bytes}` or more"))
        }
        _ => Finding::problem(
            Code::ModelUnsupported,
            said,
            "`--device cpu` computes on the processor; or take another model",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundled;
    use crate::config::DtypeChoice;

    fn draft() -> Model {
        Model::open("draft", &bundled::source("draft").expect("bundled")).expect("a model")
    }

    fn found(models: &[Model], config: &Config, room: Room, daemon: Daemon) -> Vec<Finding> {
        check((models, &[]), config, &Chosen::Cpu, room, daemon).findings
    }

    fn room(total: u64, free: u64, whose: Whose) -> Room {
        Room { total, free, whose }
    }

    #[test]
    fn what_fits_is_said_and_what_does_not_has_its_numbers() {
        let (models, config) = ([draft(), draft()], Config::default());
        let (weights, kv) = sums(&[Chosen::Cpu.needs(&models[0], &config, 0).expect("it runs"); 2]);
        let needed = weights + kv;
        let code = |room: Room, daemon| {
            let found = found(&models, &config, room, daemon);
            found.into_iter().map(|finding| (finding.code, finding.remedy)).next()
        };
        assert_eq!(code(room(needed, needed, Whose::Machine), Daemon::Absent), None);
        let (small, remedy) =
            code(room(needed - 1, needed - 1, Whose::ControlGroup), Daemon::Absent).expect("too small");
        assert!(small == Code::MemoryTooSmall && remedy.contains("MemoryMax="), "{remedy}");
        // Not even the weights.
        assert_eq!(
            code(room(1, 1, Whose::Machine), Daemon::Absent).expect("too small").0,
            Code::MemoryTooSmall
        );
        let taken = room(needed, needed - 1, Whose::Machine);
        assert_eq!(code(taken, Daemon::Absent).expect("others have it").0, Code::MemoryTaken);
        assert_eq!(code(taken, Daemon::Running), None, "the daemon has it");
    }

    #[test]
    fn settings_that_leave_a_model_too_little_are_named() {
        let room = room(64 << 30, 64 << 30, Whose::Machine);
        let small = Config { kv_bytes: Some(1 << 10), ..Config::default() };
        let found_small = found(&[draft()], &small, room, Daemon::Absent);
        assert_eq!(found_small[0].code, Code::KvTooSmall);
        let right =
            found_small[0].remedy.split_whitespace().find_map(|word| word.trim_end_matches('`').parse().ok());
        let right = Config { kv_bytes: right, ..Config::default() };
        assert!(right.kv_bytes.is_some(), "{found_small:?}");
        assert_eq!(found(&[draft()], &right, room, Daemon::Absent), []);
        let narrow = Config { model_bytes: Some(1 << 10), ..Config::default() };
        let found_narrow = found(&[draft()], &narrow, room, Daemon::Absent);
        assert_eq!(found_narrow[0].code, Code::ModelBytesTooSmall);
        let enough = found_narrow[0]
            .remedy
            .split_whitespace()
            .find_map(|word| word.trim_end_matches('`').parse().ok());
        let enough = Config { model_bytes: enough, ..Config::default() };
        assert!(enough.model_bytes.is_some(), "{found_narrow:?}");
        assert_eq!(found(&[draft()], &enough, room, Daemon::Absent), []);
        let half = Config { dtype: DtypeChoice::Bf16, ..Config::default() };
        assert_eq!(found(&[draft()], &half, room, Daemon::Absent)[0].code, Code::DtypeNeedsGpu);
    }

    #[test]
    fn each_model_of_the_catalog_has_to_fit_beside_those_that_stay() {
        let text = "models = []\n[catalog.a]\npath = 'draft'\n[catalog.b]\npath = 'draft'";
        let open = |config: &Config| {
            let (mut of_models, models) = super::super::models::check(config);
            let declared = super::super::models::check_declared(config, &models, &mut of_models);
            assert!(
                models.is_empty() && declared.len() == 2 && of_models.findings.is_empty(),
                "{of_models:?}"
            );
            declared
        };
        let config = Config::parse(text).expect("valid");
        let declared = open(&config);
        let (weights, kv) = sums(&[Chosen::Cpu.needs(&declared[0], &config, u64::MAX).expect("it runs")]);
        let room = room(weights + kv, weights + kv, Whose::Machine);
        let checked = |config: &Config| {
            let found = check((&[], &open(config)), config, &Chosen::Cpu, room, Daemon::Absent);
            (found.findings.len(), found.said.contains("none is loaded at the start"))
        };
        assert_eq!(checked(&config), (0, true), "they take turns");
        let pinned = Config::parse(&format!("{text}\nis_pinned = true")).expect("valid");
        assert_eq!(checked(&pinned), (1, true), "one stays");
    }

    #[test]
    fn a_model_of_a_published_shape_is_more_than_a_small_machine_has() {
        let models = vec!["shape:llama-3.2-1b".to_owned()];
        let config = Config { models, kv_bytes: Some(16 << 30), ..Config::default() };
        let (_, models) = super::super::models::check(&config);
        let found = found(&models, &config, room(8 << 30, 8 << 30, Whose::Machine), Daemon::Absent);
        assert_eq!(found.iter().map(|found| found.code).collect::<Vec<_>>(), [Code::MemoryTooSmall]);
    }
}
