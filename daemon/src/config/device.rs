//! What runs models, by the name that settings have for it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What runs the models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// An NVIDIA GPU if the machine has one, the processor otherwise. A GPU that is there and cannot be used is an
    /// error.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
    /// The NVIDIA GPU of this number, as the driver counts them: `cuda:1` is the second.
    Ordinal(usize),
}

/// What is no device.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0:?} is no device: there are auto, cpu, cuda, and cuda:N for one GPU of several")]
pub struct UnknownDevice(String);

impl Device {
    /// The number of the GPU that it means, if it means one.
    #[must_use]
    pub fn ordinal(self) -> usize {
        match self {
            Self::Ordinal(ordinal) => ordinal,
            Self::Auto | Self::Cpu | Self::Cuda => 0,
        }
    }

    /// Whether it is the processor.
    #[must_use]
    pub fn is_cpu(self) -> bool {
        self == Self::Cpu
    }

    /// Whether both name one device.
    #[must_use]
    pub fn is_same(self, other: Self) -> bool {
        self.is_cpu() == other.is_cpu() && self.ordinal() == other.ordinal()
    }
}

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(text.to_owned());
        Ok(match text {
            "auto" => Self::Auto,
            "cpu" => Self::Cpu,
            "cuda" => Self::Cuda,
            _ => Self::Ordinal(text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).ok_or_else(unknown)?),
        })
    }
}

impl TryFrom<String> for Device {
    type Error = UnknownDevice;

    fn try_from(text: String) -> Result<Self, UnknownDevice> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        match device {
            Device::Auto => "auto".to_owned(),
            Device::Cpu => "cpu".to_owned(),
            Device::Cuda => "cuda".to_owned(),
            Device::Ordinal(ordinal) => format!("cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_go_by_their_names() {
        for (text, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda", Device::Cuda),
            ("cuda:0", Device::Ordinal(0)),
            ("cuda:12", Device::Ordinal(12)),
        ] {
            assert_eq!(text.parse::<Device>().expect(text), device);
            assert_eq!(String::from(device), text);
        }
        for text in ["", "tpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
        assert!(Device::Cuda.is_same(Device::Ordinal(0)) && !Device::Cuda.is_same(Device::Ordinal(1)));
        assert!(!Device::Cpu.is_same(Device::Cuda));
    }
}
