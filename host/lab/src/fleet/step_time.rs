//! Formula of a step's duration in a fleet file.

use pointsman_sim::core::StepTime;
use serde::{Deserialize, Serialize};

/// Formula of a step's duration: a preset's name, or the five coefficients in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum StepTimeSpec {
    /// The polynomial of Dynamo's mocker.
    #[default]
    Dynamo,
    /// DistServe's fit for OPT-13B on A100.
    #[serde(rename = "distserve-opt-13b-a100")]
    DistServeOpt13bA100,
    /// The roofline of BLIS for Llama 3.1 8B on H100.
    #[serde(rename = "blis-llama-8b-h100")]
    BlisLlama8bH100,
    /// `c0 + c1*B + c2*sum(kv) + c3*sum(n) + c4*sum(n^2)`.
    Linear {
        /// Milliseconds a step.
        c0: f64,
        /// Milliseconds a sequence.
        c1: f64,
        /// Milliseconds a context token.
        c2: f64,
        /// Milliseconds a new token.
        c3: f64,
        /// Milliseconds a squared new token.
        c4: f64,
    },
}

impl StepTimeSpec {
    /// Names of the presets.
    pub const NAMES: [&str; 3] = ["dynamo", "distserve-opt-13b-a100", "blis-llama-8b-h100"];

    /// Returns the preset of this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        let presets = [Self::Dynamo, Self::DistServeOpt13bA100, Self::BlisLlama8bH100];
        Self::NAMES.iter().zip(presets).find(|(known, _)| **known == name).map(|(_, preset)| preset)
    }

    /// Returns its name in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dynamo => "dynamo",
            Self::DistServeOpt13bA100 => "distserve-opt-13b-a100",
            Self::BlisLlama8bH100 => "blis-llama-8b-h100",
            Self::Linear { .. } => "linear",
        }
    }

    pub(super) fn formula(self) -> StepTime {
        match self {
            Self::Dynamo => StepTime::Dynamo,
            Self::DistServeOpt13bA100 => StepTime::DistServeOpt13bA100,
            Self::BlisLlama8bH100 => StepTime::BlisLlama8bH100,
            Self::Linear { c0, c1, c2, c3, c4 } => StepTime::Linear { c0, c1, c2, c3, c4 },
        }
    }
}
