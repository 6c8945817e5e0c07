//! Files in the policy directory whose names select no slot.

use std::path::{Path, PathBuf};

use pointsman_routing::{Lane, SlotKind, World};

use crate::{
    formula::{FORMULA_SUFFIX, formula_file},
    refusal::Refusal,
};

/// Endings of source files in the languages of policies.
const SOURCES: [&str; 4] = [".js", ".py", ".rs", ".ts"];

/// Names of slots' files in a message, at most.
const MAX_EXPECTED: usize = 24;
/// Least likeness of a name that is suggested, 0 to 1.
const MIN_LIKENESS: f64 = 0.8;

/// Names of the files of all slots.
pub(super) struct SlotFiles {
    components: Vec<PathBuf>,
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
        Self { components: components.map(Path::to_owned).collect() }
    }

    /// Returns the files that a slot reads, also those that it refuses.
    pub(super) fn all(&self) -> impl Iterator<Item = PathBuf> {
        self.components.iter().flat_map(|file| [file.clone(), formula_file(file)])
    }

    /// Returns whether a slot has a file in this folder.
    pub(super) fn has_folder(&self, folder: &Path) -> bool {
        self.components.iter().any(|file| file.parent() == Some(folder))
    }

    /// Returns the formula files that a slot takes.
    fn formulas(&self) -> Vec<PathBuf> {
        let takes = |file: &&PathBuf| {
            let name = file.file_name().map(Path::new);
            name.and_then(slot_of) != Some(SlotKind::DecodeOverride)
        };
        self.components.iter().filter(takes).map(|file| formula_file(file)).collect()
    }

    /// Says what is wrong with a name that is not one of these, and which of the same kind is near.
    pub(super) fn stray(&self, file: PathBuf) -> Stray {
        let refusal = match self.of_other_model(&file) {
            Some(refusal) => refusal,
            None if is_source(&file.to_string_lossy().to_ascii_lowercase()) => Refusal::Source,
            None => self.misspelt(&file),
        };
        Stray { file, refusal }
    }

    /// Returns the refusal of a file that is named as that of a slot, in the folder of a model without it.
    fn of_other_model(&self, file: &Path) -> Option<Refusal> {
        let (model, name) = (file.parent()?.to_str()?, file.file_name()?);
        let slot = slot_of(Path::new(name)).filter(|_| !model.is_empty())?;
        let own = PathBuf::from(lane_file(slot, Lane::Active));
        let models = self.components.iter().filter(|file| file.file_name() == Some(own.as_os_str()));
        let mut models: Vec<String> =
            models.filter_map(|file| Some(file.parent()?.to_str()?.to_owned())).collect();
        models.retain(|model| !model.is_empty());
        // The one that may have been meant is not cut off.
        let near = nearest(&[&model.to_ascii_lowercase()], &models).map(str::to_owned);
        models.sort_by_key(|model| Some(model) != near.as_ref());
        let models = if models.is_empty() { "none".to_owned() } else { listed(&models) };
        Some(Refusal::NoModelSlot { model: model.to_owned(), slot, models })
    }

    fn misspelt(&self, file: &Path) -> Refusal {
        let name = file.to_string_lossy().to_ascii_lowercase();
        let with_ending = with_ending(&name);
        let names = if with_ending.ends_with(FORMULA_SUFFIX) { &self.formulas() } else { &self.components };
        // A file in the folder of a model is not meant for another model.
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let own = names.iter().filter(|name| folder.is_none() || name.parent() == folder);
        let own: Vec<String> = own.map(|file| file.display().to_string()).collect();
        let near = nearest(&[&name, &with_ending], &own).map(str::to_owned);
        let names: Vec<String> = names.iter().map(|file| file.display().to_string()).collect();
        Refusal::NoSlot { near, expected: listed(&names) }
    }
}

/// Returns the slot after which a file is named.
fn slot_of(file: &Path) -> Option<SlotKind> {
    SlotKind::ALL.into_iter().find(|slot| {
        let mut components = Lane::ALL.into_iter().map(|lane| PathBuf::from(lane_file(*slot, lane)));
        components.any(|own| own == file || formula_file(&own) == file)
    })
}

/// Returns a name with the ending that was probably meant.
fn with_ending(name: &str) -> String {
    let path = Path::new(name);
    match (name.split_once(".formula"), path.extension().and_then(|ending| ending.to_str())) {
        (Some((stem, _)), _) => format!("{stem}{FORMULA_SUFFIX}"),
        (_, Some("toml")) => format!("{}{FORMULA_SUFFIX}", path.with_extension("").display()),
        (_, Some(ending)) if Lane::ALL.into_iter().any(|lane| lane.to_string() == ending) => {
            format!("{name}.wasm")
        }
        _ => path.with_extension("wasm").display().to_string(),
    }
}

/// Returns the name that is most like one of `spellings`, if it is near.
fn nearest<'a>(spellings: &[&str], names: &'a [String]) -> Option<&'a str> {
    let likeness = |name: &str| {
        let name = name.to_ascii_lowercase();
        let likeness = spellings.iter().map(|other| strsim::normalized_damerau_levenshtein(other, &name));
        likeness.fold(0.0, f64::max)
    };
    let nearest = names.iter().map(|name| (likeness(name), name)).max_by(|(a, _), (b, _)| a.total_cmp(b));
    nearest.filter(|(likeness, _)| *likeness >= MIN_LIKENESS).map(|(_, name)| name.as_str())
}

/// Lists names, the first ones of many.
fn listed(names: &[String]) -> String {
    let first = names.get(..MAX_EXPECTED).unwrap_or(names);
    match names.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} others", first.join(", ")),
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

/// Returns whether a file is a policy before it is built.
pub(super) fn is_source(name: &str) -> bool {
    SOURCES.iter().any(|ending| name.ends_with(ending))
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
    fn n7_a_file_of_a_model_without_the_slot_is_told_which_table_to_add() {
        let files = ["prefill.wasm", "tiny/decode.wasm", "org/large/prefill.wasm"].map(Path::new);
        let files = SlotFiles::new(files.into_iter());
        let problem = |name: &str| files.stray(name.into()).problem();
        // N7.19
        assert_eq!(
            problem("org/other/prefill.canary.formula.toml"),
            "the model `org/other` has no slot prefill of its own; add [models.\"org/other\".slots.prefill] to the \
             configuration and restart; models that have it: org/large"
        );
        // N7.19
        assert!(problem("tiny/prefill.wasm").contains("add [models.\"tiny\".slots.prefill]"));
        assert!(problem("tiny/aggregated.wasm").ends_with("; models that have it: none"));
    }

    #[test]
    fn n7_the_folder_of_another_model_is_only_a_hint() {
        let models: Vec<PathBuf> =
            (0..40).map(|number| format!("model-{number}x/prefill.wasm").into()).collect();
        let files = models.iter().map(PathBuf::as_path).chain([Path::new("tiny-7b/prefill.wasm")]);
        let files = SlotFiles::new(files);
        let problem = |name: &str| files.stray(name.into()).problem();
        let told = problem("tiny-8b/prefill.wasm");
        // N7.19
        assert!(told.contains("add [models.\"tiny-8b\".slots.prefill]"), "{told}");
        assert!(told.contains("models that have it: tiny-7b, model-0x, "), "{told}");
        assert!(told.ends_with(", model-22x and 17 others") && !told.contains("did you mean"), "{told}");
        // N7.19
        assert!(!problem("tiny-8b/prefil.wasm").contains("did you mean"));
        assert!(problem("tiny-7b/prefil.wasm").ends_with("did you mean `tiny-7b/prefill.wasm`?"));
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
            ("prefill.formla.toml", "prefill.formula.toml"),
            // N7.20
            ("prefill.wat", "prefill.wasm"),
            ("prefill", "prefill.wasm"),
            ("prefill.canary", "prefill.canary.wasm"),
            ("decode.formula", "decode.formula.toml"),
            ("prefill.formula.tml", "prefill.formula.toml"),
        ] {
            let expected = format!("the file name selects no slot; did you mean `{near}`?");
            assert_eq!(problem(name), expected, "{name}");
        }
        let files =
            ["prefill.wasm", "decode-override.wasm", "tiny/decode-override.canary.wasm"].map(Path::new);
        let files = SlotFiles::new(files.into_iter());
        // N7.30
        assert_eq!(
            ["prefill.py", "src/lib.RS"].map(|name| files.stray(name.into()).refusal),
            [Refusal::Source, Refusal::Source]
        );
        // T3.6
        assert_eq!(
            files.stray("my.formula.toml".into()).problem(),
            "the file name selects no slot; expected one of prefill.formula.toml"
        );
        // T3.6
        assert!(!files.stray("decode-overide.formula.toml".into()).problem().contains("did you mean"));
        let files = ["prefill.wasm", "prefill.canary.wasm", "decode.wasm", "tiny/decode.wasm"].map(Path::new);
        let files = SlotFiles::new(files.into_iter());
        let problem = |name: &str| files.stray(name.into()).problem();
        assert_eq!(
            problem("my.wasm"),
            "the file name selects no slot; expected one of prefill.wasm, prefill.canary.wasm, decode.wasm, \
             tiny/decode.wasm"
        );
    }
}
