//! Tests which entries get into the cache of compiled code, and which stay there.

use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;

/// Plants code under each of these names, and answers that it compiled a file.
fn hostile_program(dir: &Path, names: &[&str]) -> PathBuf {
    let outline = r#"{"world":"selector","imports":[],"exports":[],"version":"0.1.1","wasi":false,"learns":false,"needs":[]}"#;
    let plants: String = names.iter().map(|name| format!("echo hostile > \"$code/{name}\"\n")).collect();
    let script = format!(
        r#"#!/bin/sh
PATH=/usr/bin:/bin
code=$(echo "$2" | sed 's/.*"cache":"\([^"]*\)".*/\1/')/modules/wasmtime-48
mkdir -p "$code"
{plants}cat > /dev/null
echo '{{"File":{{"outline":{outline},"compiled":true,"component_bytes":0,"module_bytes":[]}}}}'
"#
    );
    let program = dir.join("compiler");
    fs::write(&program, script).expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).expect("executable");
    program
}

#[test]
fn a_hostile_file_cannot_place_code_under_the_name_of_an_interpreter() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = hostile_program(dir.path(), &["file", "interpreter"]);
    let cache = dir.path().join("cache");
    let entries = cache.join("code/modules/wasmtime-48");
    fs::create_dir_all(&entries).expect("a directory");
    fs::write(entries.join("interpreter"), "good").expect("written");
    let compiler = CompilerProcess::new(program, CompileLimits::default(), Some(&cache)).expect("a compiler");
    let job = Job {
        bytes: b"hostile file",
        target: Target { file_bytes: 1_000, memory_bytes: 1_000, reservation: None },
        cancel: &Cancel::default(),
        key: &|bytes| if bytes == b"hostile file" { "file".to_owned() } else { "interpreter".to_owned() },
    };
    let loaded = compiler.compile(&job, Digest([0; 32]), |compiled| {
        assert!(compiled.component.is_none() && compiled.modules.is_empty());
        Ok(())
    });
    assert_eq!(loaded, Ok(()));
    let content = |name: &str| fs::read_to_string(entries.join(name)).expect("an entry");
    // Its own code is its own.
    assert_eq!(content("file"), "hostile\n");
    assert_eq!(content("interpreter"), "good");
    let mut left: Vec<_> =
        fs::read_dir(&cache).expect("the cache").map(|entry| entry.expect("an entry").file_name()).collect();
    left.sort_unstable();
    assert_eq!(left, ["code"], "the directory of the process is gone");
    assert_eq!(compiler.compiled(), 1);
}

#[test]
fn a_private_directory_keeps_the_modules_that_were_used_last() {
    let mut kept = VecDeque::new();
    let interpreter = || std::iter::once("interpreter".to_owned());
    note_used(&mut kept, interpreter());
    for version in 0..100 {
        note_used(&mut kept, std::iter::once(format!("module {version}")));
        note_used(&mut kept, interpreter());
        assert!(kept.len() <= KEPT_MODULES, "{} names", kept.len());
    }
    let kept: Vec<_> = kept.iter().map(String::as_str).collect();
    assert_eq!(kept.last(), Some(&"interpreter"));
    assert!(kept.contains(&"module 99") && !kept.contains(&"module 0"), "{kept:?}");
}

#[test]
fn n7_a_reason_outside_the_file_is_named_and_not_held_against_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let compile = |program: &Path, limits, cache: &Path| {
        let compiler = CompilerProcess::new(program.to_owned(), limits, Some(cache)).expect("a compiler");
        let job = Job {
            bytes: b"file",
            target: Target { file_bytes: 1_000, memory_bytes: 1_000, reservation: None },
            cancel: &Cancel::default(),
            key: &|_| "file".to_owned(),
        };
        let refused = compiler.compile(&job, Digest([0; 32]), |_| Ok(())).expect_err("refused");
        assert!(refused.kind() == "not_compiled" && refused.may_pass_by_itself(), "{refused}");
        refused.to_string()
    };
    let cache = dir.path().join("cache");
    let program = hostile_program(dir.path(), &["file"]);
    // N7.9
    let in_the_way = dir.path().join("file");
    fs::write(&in_the_way, "").expect("written");
    let refused = compile(&program, CompileLimits::default(), &in_the_way);
    assert!(
        refused.contains(&format!("the directory {} for compiled code", in_the_way.display())),
        "{refused}"
    );
    let refused = compile(&dir.path().join("none"), CompileLimits::default(), &cache);
    assert!(refused.contains("cannot be run"), "{refused}");
    fs::write(&program, "#!/bin/sh\nexec /bin/sleep 60\n").expect("written");
    let limits = CompileLimits { timeout: Duration::from_secs(1), ..CompileLimits::default() };
    let refused = compile(&program, limits, &cache);
    assert!(refused.contains("its process got 0.0 s of CPU time in 1 s: the host is busy"), "{refused}");
    assert!(quarantined_files(&cache).expect("read").is_empty());
}

#[test]
fn n7_a_compiler_process_that_is_ended_from_outside_is_not_held_against_its_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = hostile_program(dir.path(), &["file"]);
    let cache = dir.path().join("cache");
    let compiler =
        CompilerProcess::new(program.clone(), CompileLimits::default(), Some(&cache)).expect("a compiler");
    let compile = |script: String| {
        fs::write(&program, format!("#!/bin/sh\nulimit -c 0\n{script}\n")).expect("written");
        let job = Job {
            bytes: b"file",
            target: Target { file_bytes: 1_000, memory_bytes: 1_000, reservation: None },
            cancel: &Cancel::default(),
            key: &|_| "file".to_owned(),
        };
        compiler.compile(&job, Digest([0; 32]), |_| Ok(())).expect_err("refused")
    };
    let quarantined = || quarantined_files(&cache).expect("read").len();
    let seen = dir.path().join("group");
    compile(format!("read -r stat < /proc/$$/stat\nset -- $stat\necho \"$1 $5\" > {}", seen.display()));
    let group = fs::read_to_string(seen).expect("written");
    let (process, group) = group.trim_end().split_once(' ').expect("two ids");
    // N7.18
    assert_eq!(process, group, "it leads a group of its own");
    for (name, number) in [("HUP", 1), ("INT", 2), ("QUIT", 3), ("USR1", 10), ("TERM", 15)] {
        let refused = compile(format!("kill -{name} $$"));
        let told = format!("its process was ended from outside by signal {number};");
        // N7.18
        assert!(refused.may_pass_by_itself() && refused.to_string().contains(&told), "{name}: {refused}");
        assert_eq!(quarantined(), 0, "{name}");
    }
    compiler.drain();
    let refused = compile("kill -KILL $$".to_owned());
    // N7.18
    assert!(refused.may_pass_by_itself() && quarantined() == 0, "while the gateway drains: {refused}");
    compiler.draining.store(false, Ordering::Relaxed);
    assert_eq!(compile("kill -SEGV $$".to_owned()).kind(), "compiler_died");
    assert_eq!(quarantined(), 1, "the file is to blame");
}
