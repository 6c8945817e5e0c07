//! Model directories for tests: the fixture, and changed copies of it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use pointsman_tokens::{LoadOptions, Tokenizer};
use serde_json::Value;
use tempfile::TempDir;

/// Directory of the fixtures.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Loads the fixture's tokenizer without a cache.
pub(crate) fn uncached(folder: &Path) -> Tokenizer {
    Tokenizer::load_with(
        folder,
        &LoadOptions { cache_bytes: 0, fast_encoder: false, ..LoadOptions::default() },
    )
    .unwrap()
}

/// A copy of the fixture that can be changed.
pub(crate) struct Model {
    folder: TempDir,
}

impl Model {
    pub(crate) fn copied() -> Self {
        let folder = TempDir::new().unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(fixtures().join("model").join(file), folder.path().join(file)).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, file: &str, text: &str) {
        let path = self.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn change(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.path().join(file);
        let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(path, json.to_string()).unwrap();
    }

    pub(crate) fn load(&self) -> Tokenizer {
        Tokenizer::load(self.path()).unwrap()
    }
}
