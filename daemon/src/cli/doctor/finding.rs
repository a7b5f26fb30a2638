//! What a check finds.

use std::fmt;

use serde::Serialize;

/// What is found, in a word that does not change: programs know findings by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Code {
    GpuHidden,
    NoDriver,
    DriverTooOld,
    DriverFailed,
    NoDevice,
    DeviceTooOld,
    DeviceNoPermission,
    DeviceNodeMissing,
    GpuFailed,
    LibraryMissing,
    LibraryBroken,
    LibraryTooOld,
    LibraryWrongVersion,
    HeadersMissing,
    BundledModelBroken,
    CacheUnusable,
    GuestsDirUnusable,
    StateDirUnusable,
    NoSocketPlace,
    SocketPlaceClosed,
    SocketNoPermission,
    SocketUnusable,
    StaleSocket,
    StaleLock,
    LockHeld,
    DaemonSilent,
    DaemonFailed,
    NotADaemon,
    ConfigBroken,
    ClassBroken,
    PermissionBroken,
    PolicyBroken,
    ModelMissing,
    ModelUnreadable,
    ModelFileMissing,
    ModelFileBroken,
    ModelFileCutOff,
    ModelWrongDtype,
    ModelWrongShape,
    ModelWrongTensors,
    ModelTwice,
    ModelUnsupported,
    DtypeNeedsGpu,
    KvTooSmall,
    ModelBytesTooSmall,
    MemoryTooSmall,
    MemoryTaken,
    MemoryUnknown,
    NoIsolation,
    NoLandlock,
    OldLandlock,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What a finding means for a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Weight {
    /// Something does not work as it is set up.
    Problem,
    /// All works; it is good to know.
    Note,
}

/// One thing that is not as it could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) code: Code,
    pub(super) weight: Weight,
    /// What is wrong, in one line without places.
    pub(super) said: String,
    /// A command to type, or a setting to change.
    pub(super) remedy: String,
    /// Paths, versions, and what the system has said.
    pub(super) details: Vec<String>,
}

impl Finding {
    pub(super) fn problem(code: Code, said: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { code, weight: Weight::Problem, said: said.into(), remedy: remedy.into(), details: Vec::new() }
    }

    pub(super) fn note(code: Code, said: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { weight: Weight::Note, ..Self::problem(code, said, remedy) }
    }

    /// It keeps nothing from working.
    pub(super) fn weigh_less(&mut self) {
        self.weight = Weight::Note;
    }

    /// With one more line of details.
    pub(super) fn with(mut self, detail: impl Into<String>) -> Self {
        self.details.push(detail.into());
        self
    }

    pub(super) fn is_problem(&self) -> bool {
        self.weight == Weight::Problem
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    /// What is there, where it is as it should be.
    pub(super) said: String,
    /// Paths and versions, whether or not all is well.
    pub(super) details: Vec<String>,
    pub(super) findings: Vec<Finding>,
}

impl Check {
    pub(super) fn new(name: &'static str, said: impl Into<String>) -> Self {
        Self { name, said: said.into(), details: Vec::new(), findings: Vec::new() }
    }

    /// One that has found this.
    pub(super) fn found(name: &'static str, finding: Finding) -> Self {
        Self { findings: vec![finding], ..Self::new(name, "") }
    }

    /// With one more line of details.
    pub(super) fn with(mut self, detail: impl Into<String>) -> Self {
        self.details.push(detail.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_the_same_word_for_people_and_for_programs() {
        let json = serde_json::to_value(Code::ModelFileCutOff).expect("a text");
        assert_eq!(Some(Code::ModelFileCutOff.to_string().as_str()), json.as_str());
        assert_eq!(Code::NotADaemon.to_string(), "not-a-daemon");
    }
}
