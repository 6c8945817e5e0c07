//! Emulates a pod of the files: its volumes as directories, its environment, and the binary in it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use super::{container, read, strings};
use crate::process::{POINTSMAN, Process, command, run};

/// Directories and files of a pod, below a directory of the test.
pub(crate) struct Pod {
    dir: TempDir,
    /// Number of contents that the ConfigMap volumes had.
    written: u32,
}

impl Pod {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for path in ["etc/pointsman/config", "etc/pointsman/policies.d", "var/cache/pointsman", "tmp"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        Self { dir, written: 0 }
    }

    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join(inside.trim_start_matches('/'))
    }

    /// Replaces the paths of a container in a text by those of the test.
    pub(crate) fn placed(&self, text: &str) -> String {
        ["/etc/pointsman/", "/var/cache/pointsman"]
            .iter()
            .fold(text.to_owned(), |text, path| text.replace(path, self.path(path).to_str().unwrap()))
    }

    /// The configuration of the ConfigMap with the paths of the test.
    pub(crate) fn config(&self) -> String {
        self.placed(&read("base/pointsman.toml"))
    }

    /// Gives a ConfigMap volume new content, as a kubelet does: files link to `..data/FILE`, and `..data` is
    /// replaced by renaming a link.
    pub(crate) fn mount(&mut self, volume: &str, files: &[(&str, &[u8])]) {
        let volume = self.path(volume);
        self.written += 1;
        let version = format!("..{}", self.written);
        fs::create_dir(volume.join(&version)).unwrap();
        for (name, bytes) in files {
            fs::write(volume.join(&version).join(name), bytes).unwrap();
        }
        symlink(&version, volume.join("..data_tmp")).unwrap();
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        for (name, _) in files {
            if !volume.join(name).exists() {
                symlink(Path::new("..data").join(name), volume.join(name)).unwrap();
            }
        }
    }

    /// Variables of a container in a file, with the paths of the test.
    pub(crate) fn variables(&self, file: &str) -> BTreeMap<String, String> {
        let list = container(file, "containers")["env"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        list.iter().map(|one| (text(&one["name"]), self.placed(&text(&one["value"])))).collect()
    }

    /// Runs `pointsman` to its end. Returns the exit code and what it printed.
    pub(crate) fn run(&self, arguments: &[&str], variables: &BTreeMap<String, String>) -> (i32, String) {
        let (code, out, err) = run(self.command(variables).args(arguments), "");
        (code.unwrap(), out + &err)
    }

    /// Starts the gateway with the arguments of the Deployment. Returns the addresses of its
    /// listeners for clients and operators.
    pub(crate) fn start(&self) -> (Process, String, String) {
        let arguments = strings(&container("base/deployment.yaml", "containers")["args"]);
        let arguments = arguments.iter().map(|argument| self.placed(argument));
        let log = fs::File::create(self.path("log")).unwrap();
        let mut command = self.command(&BTreeMap::new());
        let mut process = Process::start(command.args(arguments).stdout(Stdio::piped()).stderr(log));
        let [clients, admin] = process.addresses();
        (process, clients, admin)
    }

    fn command(&self, variables: &BTreeMap<String, String>) -> Command {
        let mut command = command::<&str>(POINTSMAN, &[]);
        // The root of the container is read-only: what is written has to go to the cache.
        command.env("TMPDIR", "/nonexistent").envs(variables);
        command
    }
}
