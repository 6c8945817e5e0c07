//! Files in the policy directory whose names select no slot.

use std::path::{Path, PathBuf};

use pointsman_routing::{Lane, SlotKind, World};

use super::program_builder::formula_file;
use crate::{formula::FORMULA_SUFFIX, refusal::Refusal};

/// Names of slots' files in a message, at most.
const MAX_EXPECTED: usize = 24;
/// Least likeness of a name that is suggested, 0 to 1.
const MIN_LIKENESS: f64 = 0.8;

/// Names of the files of all slots.
pub(super) struct SlotFiles {
    components: Vec<PathBuf>,
    formulas: Vec<PathBuf>,
}

/// A file of no slot, or the policy directory while it cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stray {
    pub(super) file: PathBuf,
    pub(super) refusal: Refusal,
}

/// Returns the name of the file of a slot's lane.
pub(super) fn lane_file(slot: SlotKind, lane: Lane) -> String {
    match lane {
        Lane::Active => format!("{slot}.wasm"),
        lane => format!("{slot}.{lane}.wasm"),
    }
}

/// Checks the name of a file for the policy directory. A name that is not like that of a slot's file is
/// accepted, because the file may be copied to another one.
///
/// # Errors
/// [`Refusal::NoSlot`] when the name seems misspelt, and [`Refusal::WrongSlot`] when its slot does not run a
/// policy of this world.
pub fn check_file_name(name: &str, world: World) -> Result<(), Refusal> {
    let lanes = SlotKind::ALL.into_iter().flat_map(|slot| Lane::ALL.map(|lane| (slot, lane)));
    let names: Vec<(SlotKind, PathBuf)> =
        lanes.map(|(slot, lane)| (slot, PathBuf::from(lane_file(slot, lane)))).collect();
    let is_of = |file: &Path| file == Path::new(name) || formula_file(file) == Path::new(name);
    match names.iter().find(|(_, file)| is_of(file)) {
        Some((slot, _)) if (*slot == SlotKind::DecodeOverride) == (world == World::DecodeOverride) => Ok(()),
        Some((slot, _)) => Err(Refusal::WrongSlot { world, slot: *slot }),
        None => match SlotFiles::new(names.iter().map(|(_, file)| file.as_path())).stray(name.into()).refusal
        {
            Refusal::NoSlot { near: None, .. } => Ok(()),
            misspelt => Err(misspelt),
        },
    }
}

impl SlotFiles {
    /// `components`: those of all lanes.
    pub(super) fn new<'a>(components: impl Iterator<Item = &'a Path>) -> Self {
        let components: Vec<PathBuf> = components.map(Path::to_owned).collect();
        let formulas = components.iter().map(|file| formula_file(file)).collect();
        Self { components, formulas }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Path> {
        self.components.iter().chain(&self.formulas).map(PathBuf::as_path)
    }

    /// Says what is wrong with a name that is not one of these, and which of the same ending is near.
    pub(super) fn stray(&self, file: PathBuf) -> Stray {
        let mut name = file.to_string_lossy().to_ascii_lowercase();
        if let Some(stem) = name.strip_suffix(".toml").filter(|_| !name.ends_with(FORMULA_SUFFIX)) {
            name = format!("{stem}{FORMULA_SUFFIX}");
        }
        let names = if name.ends_with(FORMULA_SUFFIX) { &self.formulas } else { &self.components };
        let names: Vec<String> = names.iter().map(|file| file.display().to_string()).collect();
        let likeness =
            |other: &String| strsim::normalized_damerau_levenshtein(&name, &other.to_ascii_lowercase());
        let near = names.iter().map(|other| (likeness(other), other));
        let near =
            near.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(likeness, _)| *likeness >= MIN_LIKENESS);
        let near = near.map(|(_, name)| name.clone());
        let listed = names.get(..MAX_EXPECTED).unwrap_or(&names);
        let more = names.len() - listed.len();
        let mut expected = listed.join(", ");
        if more > 0 {
            expected.push_str(&format!(" and {more} others"));
        }
        Stray { file, refusal: Refusal::NoSlot { near, expected } }
    }
}

impl Stray {
    pub(super) fn name(&self) -> String {
        self.file.display().to_string()
    }

    /// Returns whether this is the policy directory itself, which cannot be read.
    pub(super) fn is_directory(&self) -> bool {
        matches!(self.refusal, Refusal::DirectoryGone(_))
    }

    pub(super) fn problem(&self) -> String {
        self.refusal.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_refused_when_it_is_misspelt_or_its_slot_does_not_run_the_world() {
        let check = |name: &str, world| check_file_name(name, world).map_err(|refusal| refusal.to_string());
        for name in ["prefill.wasm", "decode.shadow.wasm", "aggregated.canary.formula.toml", "shortest.wasm"]
        {
            assert_eq!(check(name, World::Selector), Ok(()), "{name}");
        }
        assert_eq!(check("decode-override.wasm", World::DecodeOverride), Ok(()));
        for name in ["decode-override.formula.toml", "decode-override.canary.wasm"] {
            let told = check(name, World::Selector).unwrap_err();
            assert!(told.starts_with("a selector cannot fill the slot decode-override"), "{told}");
        }
        assert!(check("prefill.wasm", World::DecodeOverride).is_err());
        let told = check("prefil.formula.toml", World::Selector).unwrap_err();
        assert!(told.ends_with("did you mean `prefill.formula.toml`?"), "{told}");
    }

    #[test]
    fn a_misspelled_name_has_the_nearest_name_of_its_kind_and_another_one_has_all() {
        let files = ["prefill.wasm", "prefill.canary.wasm", "decode.wasm", "tiny/decode.wasm"].map(Path::new);
        let files = SlotFiles::new(files.into_iter());
        let problem = |name: &str| files.stray(name.into()).problem();
        for (name, near) in [
            ("prefil.formula.toml", "prefill.formula.toml"),
            ("prefil.wasm", "prefill.wasm"),
            ("prefill.canray.wasm", "prefill.canary.wasm"),
            ("tiny/decod.formula.toml", "tiny/decode.formula.toml"),
            // N7.7
            ("prefill.toml", "prefill.formula.toml"),
            ("Prefill.formula.TOML", "prefill.formula.toml"),
            ("PREFILL.WASM", "prefill.wasm"),
        ] {
            let expected = format!("the file name selects no slot; did you mean `{near}`?");
            assert_eq!(problem(name), expected, "{name}");
        }
        assert_eq!(
            problem("my.wasm"),
            "the file name selects no slot; expected one of prefill.wasm, prefill.canary.wasm, decode.wasm, \
             tiny/decode.wasm"
        );
    }
}
