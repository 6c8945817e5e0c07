//! One way to route: the content of the four slots.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER, by_name, default_of};
use pointsman_orchestration::QueueOrder;
use pointsman_policy_runtime::{
    Access, Capacity, CompiledPolicy, FORMULA_SUFFIX, FormulaSettings, Limits, PolicyEngine, Refusal,
    compile, with_hashed_tenants,
};
use pointsman_routing::{
    NativeMode, Normalize, Origin, Picker, Policy, Program, Slot, SlotEvent, SlotKind, SlotSet, Slots,
    WeightedScorer, World,
};
use tokio::{sync::mpsc, time::Duration};

/// CPU time limit of one call, generous because no client waits in a simulation: with a limit of a few
/// milliseconds, results would depend on how busy the machine is. A call that never returns takes the whole
/// limit.
const CALL_DEADLINE: Duration = Duration::from_millis(500);
/// Arms and orders that are not parts of other arms.
const WORDS: [&str; 4] = ["oracle", "default", "edf", "fifo"];

/// An arm, with its policies compiled.
#[derive(Debug)]
pub struct Arm {
    /// Name in reports.
    pub label: String,
    /// Parts with their settings, as the user wrote them.
    pub parts: String,
    /// Order of the requests that wait in the gateway.
    pub(crate) order: QueueOrder,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Native(NativeMode),
    /// The oracle, which knows the true state of every engine.
    Oracle,
    /// Policies, each of which serves every slot of its world.
    Policies(Vec<Part>),
    /// The policy of each slot of a gateway without configuration.
    Default(Vec<(SlotKind, Part)>),
}

/// A compiled policy with its settings.
struct Part {
    policy: CompiledPolicy,
    settings: String,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Part").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Reason for which an arm cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum ArmError {
    /// A part is neither a native mode, a built-in policy nor a file.
    #[error(
        "\"{0}\" is neither a native mode (round-robin, random, power-of-two, least-loaded, kv), the oracle, the \
         default, a built-in policy ({names}) nor a file",
        names = pointsman_embedded_policies::NAMES
    )]
    Unknown(String),
    /// A file cannot be read.
    #[error("{file}: {error}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        error: std::io::Error,
    },
    /// A policy is refused, as the gateway would refuse it.
    #[error("{file}: refused ({}): {refusal}", refusal.kind())]
    Refused {
        /// The file or the built-in policy.
        file: String,
        /// Reason for the refusal.
        refusal: Refusal,
    },
    /// The parts cannot serve one slot together.
    #[error("{label}: {problem}")]
    Parts {
        /// The arm.
        label: String,
        /// Description of the conflict.
        problem: String,
    },
    /// A label is empty, or another arm has it.
    #[error("--arm {arm}: its label \"{label}\" {problem}: give another with --arm LABEL=PARTS")]
    Label {
        /// The arm.
        arm: String,
        /// Its label.
        label: String,
        /// What is wrong with the label.
        problem: &'static str,
    },
    /// wasmtime cannot start.
    #[error("cannot create the policy engine: {0}")]
    Engine(String),
}

impl Arm {
    /// Builds arms, whose labels have to differ, and configures each once: the runs of the arms before it may
    /// take an hour.
    ///
    /// # Errors
    /// [`ArmError`]
    pub fn parse_all<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Vec<Self>, ArmError> {
        let mut arms: Vec<Self> = Vec::new();
        for text in texts {
            let arm = Self::parse(text)?;
            if arms.iter().any(|other| other.label == arm.label) {
                let (arm, label) = (text.to_owned(), arm.label);
                return Err(ArmError::Label { arm, label, problem: "is that of another arm" });
            }
            arm.slots()?;
            arms.push(arm);
        }
        Ok(arms)
    }

    /// Builds an arm from `[LABEL=]PART[+PART…]`, or from `default`, which is what a gateway without
    /// configuration runs. A part is a native mode, a built-in policy or a policy file. Settings, a JSON
    /// object, follow the part as `@SETTINGS`. `+edf` or `+fifo` at the end sets the order of the requests
    /// that wait in the gateway.
    ///
    /// # Errors
    /// [`ArmError`]
    pub fn parse(text: &str) -> Result<Self, ArmError> {
        let (label, parts) = labelled(text);
        let (label, written) = (label.to_owned(), parts.to_owned());
        if label.trim().is_empty() {
            return Err(ArmError::Label { arm: text.to_owned(), label, problem: "is empty" });
        }
        let (parts, order) = match parts.rsplit_once('+') {
            Some((parts, "edf")) => (parts, QueueOrder::Edf),
            Some((parts, "fifo")) => (parts, QueueOrder::Fifo),
            _ => (parts, QueueOrder::LateLast),
        };
        if parts == "oracle" {
            return Ok(Self { label, parts: written, order, content: Content::Oracle });
        }
        if let Some(mode) = native(parts) {
            return Ok(Self { label, parts: written, order, content: Content::Native(mode) });
        }
        let limits = Limits {
            deadline: CALL_DEADLINE,
            configure_deadline: CALL_DEADLINE,
            observe_deadline: CALL_DEADLINE,
            rebuild_in_call: true,
            ..Limits::default()
        };
        let engine = PolicyEngine::new(limits, Capacity::detect())
            .map_err(|error| ArmError::Engine(format!("{error:#}")))?;
        let content = if parts == "default" {
            let parts = SlotKind::ALL.map(|kind| Part::compile(&engine, default_of(kind.as_str())));
            let parts = parts.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten();
            Content::Default(SlotKind::ALL.into_iter().zip(parts).collect())
        } else {
            let parts = split(parts);
            // Alone, each of these is an arm or its order.
            let is_whole = |part: &&&str| WORDS.contains(*part) || native(part).is_some();
            if let Some(part) = parts.iter().find(is_whole).filter(|_| parts.len() > 1) {
                let problem = match *part {
                    "edf" | "fifo" => {
                        format!("has +{part} before another part; an arm has one order, at its end")
                    }
                    _ => format!(
                        "has {part} beside other parts; an arm has one router, and {part} is a whole one"
                    ),
                };
                return Err(ArmError::Parts { label, problem });
            }
            let parts = parts.into_iter().map(|part| Part::compile(&engine, part));
            Content::Policies(parts.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
        };
        Ok(Self { label, parts: written, order, content })
    }

    /// Returns the files that the parts of an arm name.
    pub(crate) fn files(text: &str) -> Vec<PathBuf> {
        let names = split(labelled(text).1).into_iter();
        let names = names.map(|part| part.split_once('@').map_or(part, |(name, _)| name));
        let is_file =
            |name: &&str| native(name).is_none() && by_name(name).is_none() && !WORDS.contains(name);
        names.filter(is_file).map(PathBuf::from).collect()
    }

    /// Returns the arm of a native mode.
    pub(crate) fn native(mode: NativeMode) -> Self {
        Self {
            label: String::new(),
            parts: String::new(),
            order: QueueOrder::default(),
            content: Content::Native(mode),
        }
    }

    /// Whether the arm is the oracle, which pins every leg.
    pub(crate) fn is_oracle(&self) -> bool {
        matches!(self.content, Content::Oracle)
    }

    /// Builds new slots without anything that a policy learned or stored in another run. The receiver gets
    /// the failed calls of policies.
    ///
    /// # Errors
    /// [`ArmError`] when a policy refuses its settings, or the parts do not fit together.
    pub(crate) fn slots(&self) -> Result<(Slots, mpsc::UnboundedReceiver<SlotEvent>), ArmError> {
        let (events, failures) = mpsc::unbounded_channel();
        let (mut route, mut decide) = (Program::Native(NativeMode::Kv), Program::Native(NativeMode::Kv));
        let mut of_slots = Vec::new();
        match &self.content {
            Content::Oracle => {}
            Content::Native(mode) => route = Program::Native(*mode),
            Content::Policies(parts) => (route, decide) = self.programs(parts)?,
            Content::Default(parts) => {
                for (kind, part) in parts {
                    let (route, decide) = self.programs(std::slice::from_ref(part))?;
                    of_slots.push((*kind, if *kind == SlotKind::DecodeOverride { decide } else { route }));
                }
            }
        }
        let set = SlotSet::build(|kind| {
            let of_all = if kind == SlotKind::DecodeOverride { &decide } else { &route };
            let own = of_slots.iter().find(|(slot, _)| *slot == kind).map(|(_, program)| program);
            Slot::new(kind, None, own.unwrap_or(of_all).clone(), events.clone())
        });
        Ok((Slots::new(set, []), failures))
    }

    /// Returns the names of the facts that its policies read, and the texts of their settings.
    pub(crate) fn reads(&self) -> Result<(BTreeSet<String>, Vec<&str>), ArmError> {
        let (slots, _failures) = self.slots()?;
        let mut facts = BTreeSet::new();
        for slot in slots.iter() {
            for policy in slot.pin().program.policies() {
                let wants = &policy.info().wants;
                facts.extend(wants.request.iter().map(|fact| fact.name().to_owned()));
                facts.extend(wants.worker.iter().map(ToString::to_string));
            }
        }
        let settings = match &self.content {
            Content::Native(_) | Content::Oracle => Vec::new(),
            Content::Policies(parts) => parts.iter().map(|part| &*part.settings).collect(),
            Content::Default(parts) => parts.iter().map(|(_, part)| &*part.settings).collect(),
        };
        Ok((facts, settings))
    }

    fn programs(&self, parts: &[Part]) -> Result<(Program, Program), ArmError> {
        let (mut filters, mut scorers, mut selector, mut decide) = (Vec::new(), Vec::new(), None, None);
        let wrong =
            |problem: &str| Err(ArmError::Parts { label: self.label.clone(), problem: problem.to_owned() });
        for part in parts {
            let policy = part.load(&self.label)?;
            match policy.info().world {
                World::Filter => filters.push(policy),
                World::Scorer => {
                    scorers.push(WeightedScorer { policy, weight: 1.0, normalize: Normalize::None })
                }
                World::Selector if selector.is_some() => return wrong("has two selectors; use one of them"),
                World::DecodeOverride if decide.is_some() => {
                    return wrong("has two decode overrides; use one of them");
                }
                World::Selector => selector = Some(policy),
                World::DecodeOverride => decide = Some(policy),
            }
        }
        let route = match (selector, scorers.is_empty()) {
            (Some(_), false) => return wrong("has a selector and scorers; use one of them"),
            (Some(selector), true) => Program::Selector { filters, selector },
            (None, false) => Program::Scorers { filters, scorers, picker: Picker::Min },
            (None, true) if filters.is_empty() => Program::Native(NativeMode::Kv),
            (None, true) => return wrong("has filters only; add a scorer or a selector"),
        };
        Ok((route, decide.map_or(Program::Native(NativeMode::Kv), Program::DecodeOverride)))
    }
}

impl Part {
    /// Compiles a part: one policy, or those of a formula.
    fn compile(engine: &PolicyEngine, part: &str) -> Result<Vec<Self>, ArmError> {
        let (name, settings) = part.split_once('@').unwrap_or((part, "{}"));
        let read = || {
            let (limit, mut bytes) = (Limits::default().file_bytes as u64, Vec::new());
            // One byte more shows that it is too large. A pipe or a device may never end.
            let read = File::open(name).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
            read.map(|_| bytes).map_err(|error| ArmError::Io { file: name.to_owned(), error })
        };
        if let Some(formulas) = formulas(name, settings, read)? {
            let keep = formulas.keep.map(|keep| (FORMULA_FILTER, keep));
            let parts = keep.into_iter().chain(formulas.rank.map(|rank| (FORMULA, rank)));
            return parts.map(|(bytes, settings)| Self::of(engine, name, bytes, settings)).collect();
        }
        let bytes = match by_name(name) {
            Some(bytes) => bytes.to_vec(),
            None if Path::new(name).exists() => read()?,
            None => return Err(ArmError::Unknown(name.to_owned())),
        };
        Ok(vec![Self::of(engine, name, &bytes, with_hashed_tenants(settings, 0))?])
    }

    fn of(engine: &PolicyEngine, name: &str, bytes: &[u8], settings: String) -> Result<Self, ArmError> {
        let policy = compile(engine, bytes, &Access::new(&Access::ALL))
            .map_err(|refusal| ArmError::Refused { file: name.to_owned(), refusal })?;
        Ok(Self { policy, settings })
    }

    fn load(&self, label: &str) -> Result<Arc<dyn Policy>, ArmError> {
        // Each run starts with empty state, as each slot of a newly started gateway does.
        let loaded = self.policy.configure_with_empty_state(Origin::File(label.into()), &self.settings);
        let loaded = loaded.map_err(|refusal| ArmError::Refused { file: label.to_owned(), refusal })?;
        Ok(Arc::new(loaded))
    }
}

/// Splits an arm into its label and its parts.
fn labelled(text: &str) -> (&str, &str) {
    text.split_once('=').filter(|(label, _)| !label.contains('{')).unwrap_or((text, text))
}

/// Splits an arm at each `+` that is not in the settings of a part.
fn split(parts: &str) -> Vec<&str> {
    let (mut depth, mut is_text, mut is_escaped) = (0_usize, false, false);
    parts
        .split(|letter| {
            match letter {
                _ if is_escaped => {
                    is_escaped = false;
                    return false;
                }
                '\\' if is_text => is_escaped = true,
                '"' if depth > 0 => is_text = !is_text,
                '{' if !is_text => depth += 1,
                '}' if !is_text => depth = depth.saturating_sub(1),
                _ => {}
            }
            letter == '+' && depth == 0
        })
        .collect()
}

/// Returns the formulas of a part: those of a file, or the settings of `formula`. The names of a trace are
/// hashed without a salt.
fn formulas(
    name: &str,
    settings: &str,
    read: impl Fn() -> Result<Vec<u8>, ArmError>,
) -> Result<Option<FormulaSettings>, ArmError> {
    let refused = |why: String| ArmError::Refused { file: name.to_owned(), refusal: Refusal::Formula(why) };
    if name == "formula" {
        let settings: serde_json::Value = serde_json::from_str(settings)
            .map_err(|error| refused(format!("the settings are not JSON: {error}")))?;
        return Ok(Some(FormulaSettings::of(&settings, 0)));
    }
    if !name.ends_with(FORMULA_SUFFIX) {
        let is_near = name.ends_with(".toml");
        let near =
            || refused(format!("the file of a formula is named NAME{FORMULA_SUFFIX}: rename this one"));
        return if is_near { Err(near()) } else { Ok(None) };
    }
    let text = String::from_utf8(read()?)
        .map_err(|_| refused("the file is not UTF-8; write it as text".to_owned()))?;
    FormulaSettings::of_file(&text, 0).map(Some).map_err(refused)
}

/// Returns the native mode of this name. `direct` needs an external router, which a simulation does not have.
fn native(name: &str) -> Option<NativeMode> {
    Some(match name {
        "round-robin" => NativeMode::RoundRobin,
        "random" => NativeMode::Random,
        "power-of-two" => NativeMode::PowerOfTwo,
        "least-loaded" => NativeMode::LeastLoaded,
        "kv" => NativeMode::Kv,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
