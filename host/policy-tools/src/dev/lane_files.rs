//! The files of a slot in a gateway's policy directory: places a shadow, moves it to other lanes, and removes
//! what is left of it.
//!
//! A file is renamed into place, so that the gateway never reads half of it. The gateway ignores names that
//! begin with a dot.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, bail};
use pointsman_policy_runtime::{FORMULA_SUFFIX, digest};
use pointsman_routing::Lane;

/// Endings of a lane's file.
const ENDINGS: [&str; 2] = [".wasm", FORMULA_SUFFIX];

/// The files of one slot.
pub(super) struct LaneFiles {
    /// Directory of the slot's files: that of all policies, or of a model in it.
    dir: PathBuf,
    slot: String,
    /// Ending of the file that is placed.
    ending: &'static str,
    /// Digests of the files of this command in the directory.
    shadow: Option<String>,
    canary: Option<String>,
    promoted: Option<Promoted>,
}

/// A promotion that can be taken back.
struct Promoted {
    digest: String,
    /// Copies of the files that were in the active lane: their ending and the copy's path.
    earlier: Vec<(&'static str, PathBuf)>,
}

impl LaneFiles {
    /// Opens the files of a slot in `folder`. A shadow of somebody else is an error unless `replace` is set.
    pub(super) fn open(
        folder: &Path,
        slot: &str,
        model: Option<&str>,
        is_formula: bool,
        replace: bool,
    ) -> anyhow::Result<Self> {
        if !folder.is_dir() {
            bail!("--policies {}: not a directory; name the gateway's `policies.dir`", folder.display());
        }
        let model = Path::new(model.unwrap_or_default());
        if !model.components().all(|part| matches!(part, Component::Normal(_))) {
            bail!("--model {}: not a name that a policy directory can have", model.display());
        }
        let dir = folder.join(model);
        let ending = if is_formula { FORMULA_SUFFIX } else { ".wasm" };
        let files = Self { dir, slot: slot.to_owned(), ending, shadow: None, canary: None, promoted: None };
        for other in ENDINGS {
            let path = files.file(Lane::Shadow, other);
            // Both kinds of file at once are refused by the gateway.
            if path.exists() && (!replace || other != ending) {
                bail!("{} exists: remove it, or replace it with --replace", path.display());
            }
        }
        fs::create_dir_all(&files.dir).with_context(|| files.dir.display().to_string())?;
        Ok(files)
    }

    /// Path of a lane's file.
    pub(super) fn path(&self, lane: Lane) -> PathBuf {
        self.file(lane, self.ending)
    }

    /// Puts a policy into the shadow lane.
    pub(super) fn place(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let staged = self.hidden(&format!("{}.staged", std::process::id()));
        let path = self.path(Lane::Shadow);
        let placed = fs::write(&staged, bytes).and_then(|()| fs::rename(&staged, &path));
        if let Err(error) = placed {
            let _ = fs::remove_file(&staged);
            return Err(error).with_context(|| path.display().to_string());
        }
        self.shadow = Some(digest(bytes).to_string());
        Ok(())
    }

    /// Makes the shadow the canary, in the place of a canary of this command.
    pub(super) fn make_canary(&mut self) -> anyhow::Result<()> {
        let Some(shadow) = self.own(Lane::Shadow) else { bail!("there is no shadow of this command") };
        if self.own(Lane::Canary).is_none() {
            self.must_be_free(Lane::Canary)?;
        }
        self.rename(Lane::Shadow, Lane::Canary)?;
        (self.shadow, self.canary) = (None, Some(shadow));
        Ok(())
    }

    /// Returns whether a canary of this command has a file.
    pub(super) fn has_canary(&self) -> bool {
        self.own(Lane::Canary).is_some()
    }

    /// Makes the canary the shadow again. A newer shadow stays, and the canary is removed.
    pub(super) fn make_shadow(&mut self) -> anyhow::Result<()> {
        let Some(canary) = self.own(Lane::Canary) else { bail!("there is no canary of this command") };
        if self.own(Lane::Shadow).is_some() {
            self.remove_own(Lane::Canary)?;
        } else {
            self.must_be_free(Lane::Shadow)?;
            self.rename(Lane::Canary, Lane::Shadow)?;
            self.shadow = Some(canary);
        }
        self.canary = None;
        Ok(())
    }

    /// Returns the file of the active lane whose digest is one of these.
    pub(super) fn active_of(&self, digests: &[String]) -> Option<PathBuf> {
        let mut files = ENDINGS.map(|ending| self.file(Lane::Active, ending)).into_iter();
        files.find(|path| content(path).is_some_and(|digest| digests.contains(&digest)))
    }

    /// Makes a trial's file the file of the active lane, so that its promotion outlives the gateway. Keeps
    /// copies of the files that are in its place.
    pub(super) fn promote(&mut self, lane: Lane) -> anyhow::Result<()> {
        let Some(digest) = self.own(lane) else {
            bail!("{} was replaced by another program", self.path(lane).display())
        };
        let mut earlier = Vec::new();
        for ending in ENDINGS {
            let (path, copy) = (self.file(Lane::Active, ending), self.hidden(&format!("before-dev{ending}")));
            if path.exists() {
                fs::copy(&path, &copy).with_context(|| copy.display().to_string())?;
                earlier.push((ending, copy));
            }
        }
        // The gateway refuses both kinds of file at once. It takes a short absence for a replacement.
        for (ending, _) in earlier.iter().filter(|(ending, _)| *ending != self.ending) {
            let path = self.file(Lane::Active, ending);
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
        self.rename(lane, Lane::Active)?;
        *self.digest_of(lane) = None;
        self.promoted = Some(Promoted { digest, earlier });
        Ok(())
    }

    /// Digest of the policy whose promotion can be taken back.
    pub(super) fn promoted(&self) -> Option<&str> {
        self.promoted.as_ref().map(|promoted| promoted.digest.as_str())
    }

    /// Restores the files that were in the active lane before the promotion.
    pub(super) fn undo_promotion(&mut self) -> anyhow::Result<()> {
        let Some(promoted) = self.promoted.take() else { bail!("nothing was promoted") };
        let path = self.path(Lane::Active);
        if content(&path).as_ref() != Some(&promoted.digest) {
            bail!("{} was replaced by another program, and stays", path.display());
        }
        if !promoted.earlier.iter().any(|(ending, _)| *ending == self.ending) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
        for (ending, copy) in &promoted.earlier {
            let path = self.file(Lane::Active, ending);
            fs::rename(copy, &path).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Removes the trials of this command. Returns one sentence for each file that matters.
    pub(super) fn remove(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        for lane in [Lane::Shadow, Lane::Canary] {
            if self.digest_of(lane).is_none() {
                continue;
            }
            let path = self.path(lane).display().to_string();
            said.push(match (self.own(lane), self.remove_own(lane)) {
                (None, _) => format!("{path} was replaced by another program, and stays"),
                (_, Ok(())) => format!("removed {path}"),
                (_, Err(error)) => format!("{error:#}; remove it by hand"),
            });
        }
        said
    }

    /// Copies of files that a promotion replaced.
    pub(super) fn copies(&self) -> impl Iterator<Item = &PathBuf> {
        self.promoted.iter().flat_map(|promoted| &promoted.earlier).map(|(_, copy)| copy)
    }

    /// The digest of a lane's file, while it is the one that this command placed.
    fn own(&self, lane: Lane) -> Option<String> {
        let placed = match lane {
            Lane::Canary => &self.canary,
            _ => &self.shadow,
        };
        placed.clone().filter(|placed| content(&self.path(lane)).as_ref() == Some(placed))
    }

    fn digest_of(&mut self, lane: Lane) -> &mut Option<String> {
        match lane {
            Lane::Canary => &mut self.canary,
            _ => &mut self.shadow,
        }
    }

    fn remove_own(&mut self, lane: Lane) -> anyhow::Result<()> {
        let own = self.own(lane).is_some();
        *self.digest_of(lane) = None;
        let path = self.path(lane);
        if own { fs::remove_file(&path).with_context(|| path.display().to_string()) } else { Ok(()) }
    }

    fn must_be_free(&self, lane: Lane) -> anyhow::Result<()> {
        let taken = ENDINGS.map(|ending| self.file(lane, ending)).into_iter().find(|path| path.exists());
        match taken {
            Some(path) => {
                bail!("{} exists, and this command did not write it; remove it first", path.display())
            }
            None => Ok(()),
        }
    }

    fn rename(&self, from: Lane, to: Lane) -> anyhow::Result<()> {
        let (from, to) = (self.path(from), self.path(to));
        fs::rename(&from, &to).with_context(|| format!("{} to {}", from.display(), to.display()))
    }

    fn file(&self, lane: Lane, ending: &str) -> PathBuf {
        let slot = &self.slot;
        self.dir.join(match lane {
            Lane::Active => format!("{slot}{ending}"),
            lane => format!("{slot}.{lane}{ending}"),
        })
    }

    fn hidden(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{}.{name}", self.slot))
    }
}

/// Digest of a file.
fn content(path: &Path) -> Option<String> {
    fs::read(path).ok().map(|bytes| digest(&bytes).to_string())
}

#[cfg(test)]
mod tests;
