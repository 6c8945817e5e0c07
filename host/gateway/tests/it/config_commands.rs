//! `pointsman config`: schema, example, and the values in force with where each came from.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "tests and their helpers may fail"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde_json::Value;

use crate::{
    check_config::with_config,
    process::{POINTSMAN, command, run},
};

/// Exit code, stdout and stderr of `pointsman` in a directory, with environment variables.
fn pointsman(dir: &Path, variables: &[(&str, &str)], arguments: &[&str]) -> (Option<i32>, String, String) {
    run(command(POINTSMAN, arguments).current_dir(dir).envs(variables.iter().copied()), "")
}

/// The line of `text` that gives `key` in the table with this header.
fn line<'a>(text: &'a str, header: &str, key: &str) -> &'a str {
    let (_, after) =
        text.split_once(&format!("{header}\n")).unwrap_or_else(|| panic!("no {header} in {text}"));
    let table = after.split("\n[").next().unwrap();
    let own = |line: &&str| line.starts_with(&format!("{key} = "));
    table.lines().find(own).unwrap_or_else(|| panic!("no {key} in {header}: {table}"))
}

#[test]
fn each_value_is_shown_with_its_source_and_no_secret() {
    let dir = with_config(
        "[server]\nadmin_token = \"sk-SECRET-1\"\n[routing]\nhash_salt = 7007\nretries = 3\nblock_size = 32\n\
         [models.\"org/name.v1\"]\ntokenizer = \"engine\"\n\
         [[workers]]\nurl = \"http://10.0.0.1:8000\"\nrole = \"prefill\"\nengine = \"vllm\"\napi_key = \"sk-SECRET-2\"\n",
    );
    let variables = [
        ("POINTSMAN__ROUTING__BLOCK_SIZE", "64"),
        ("POINTSMAN__SERVER__LISTEN", "127.0.0.1:1111"),
        ("POINTSMAN__SERVER__ADMIN_TOKEN", "sk-SECRET-3"),
        ("POINTSMAN__TIMEOUTS__CONNECT", "7s"),
    ];
    let arguments = [
        "config",
        "show",
        "--config",
        "p.toml",
        "--listen",
        "127.0.0.1:2222",
        "--worker",
        "role=decode,engine=vllm,url=http://10.0.0.2",
    ];
    let (code, shown, problems) = pointsman(dir.path(), &variables, &arguments);
    assert_eq!((code, problems.as_str()), (Some(0), ""));
    let source = |header, key| {
        let line = line(&shown, header, key);
        let (value, source) = line.split_once(" # ").unwrap();
        (value.split_once(" = ").unwrap().1.trim_end().to_owned(), source.to_owned())
    };
    let expect = |header, key, value: &str, from: &str| {
        assert_eq!(source(header, key), (value.to_owned(), from.to_owned()), "{header} {key}");
    };
    // N2.1
    expect("[routing]", "retries", "3", "p.toml:5");
    expect("[routing]", "busy_status", "529", "default");
    expect("[models.\"org/name.v1\"]", "tokenizer", "\"engine\"", "p.toml:8");
    expect("[[workers]]", "role", "\"prefill\"", "p.toml:11");
    // N1.1
    expect("[routing]", "block_size", "64", "POINTSMAN__ROUTING__BLOCK_SIZE");
    expect("[timeouts]", "connect", "\"7s\"", "POINTSMAN__TIMEOUTS__CONNECT");
    expect("[server]", "listen", "\"127.0.0.1:2222\"", "--listen");
    assert!(shown.contains("--worker role=decode"), "{shown}");
    // N2.2
    assert!(!shown.contains("SECRET") && !shown.contains("7007"), "{shown}");
    expect("[server]", "admin_token", "\"[secret]\"", "POINTSMAN__SERVER__ADMIN_TOKEN");

    // N2.3
    let again = with_config(&shown);
    let (code, second, problems) = pointsman(again.path(), &[], &["config", "show", "--config", "p.toml"]);
    assert_eq!((code, problems.as_str()), (Some(0), ""));
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.contains("hash_salt"));
        lines.map(|line| line.split(" # ").next().unwrap().trim_end().to_owned()).collect()
    };
    assert_eq!(values(&second), values(&shown));

    let (_, json, _) = pointsman(dir.path(), &variables, &["config", "show", "--json", "--config", "p.toml"]);
    let json: Vec<Value> = serde_json::from_str(&json).unwrap();
    let of = |path: &str| json.iter().find(|value| value["path"] == path).unwrap();
    assert_eq!(of("routing.retries")["source"]["line"], 5);
    assert_eq!(of("routing.retries")["value"], 3);
    assert_eq!(of("routing.block_size")["source"]["given"], "POINTSMAN__ROUTING__BLOCK_SIZE");
    assert_eq!(of("index.ttl")["source"], "default");
    assert_eq!(of("workers[0].url")["value"], "http://10.0.0.1:8000");
    assert_eq!(of("routing.hash_salt")["value"], "[secret]");
    assert!(!format!("{json:?}").contains("SECRET"));
}

#[test]
fn n2_keys_of_discovered_workers_and_queries_of_urls_are_hidden() {
    let dir = with_config(
        "[auth.jwt]\nissuer = 'i'\naudience = ['a']\njwks_url = 'https://h/x?token=SECRET'\n\
         [traces]\nendpoint = 'https://h/x?key=SECRET'\n\
         [[discovery.dns]]\nname = 'a'\nrecord = 'a.b'\n\
         defaults = { engine = 'vllm', role = 'decode', api_key = 'SECRET' }\n\
         [[discovery.kubernetes]]\nname = 'a'\nselector = 'a=b'\ndefaults = { api_key = 'SECRET' }\n",
    );
    for arguments in
        [&["config", "show", "--config", "p.toml"][..], &["config", "show", "--json", "--config", "p.toml"]]
    {
        let (code, shown, problems) = pointsman(dir.path(), &[], arguments);
        assert_eq!((code, problems.as_str()), (Some(0), ""));
        // N2.2
        assert!(!shown.contains("SECRET") && shown.matches("[secret]").count() == 4, "{shown}");
        assert!(shown.contains("https://h/x?[secret]"), "{shown}");
    }
    for text in [
        "[auth.jwt]\nissuer = 'i'\naudience = ['a']\njwks_url = 'http://u:SECRET@h/x?token=SECRET'\n",
        "[[discovery.etcd]]\nname = 'a'\nendpoints = ['https://h?token=SECRET']\n",
        "[replicas]\nservers = ['nats://h?token=SECRET']\n",
    ] {
        let dir = with_config(text);
        let url = "role=decode,engine=vllm,url=http://h?token=SECRET";
        let arguments = ["config", "show", "--config", "p.toml", "--worker", url];
        let (code, _, problems) = pointsman(dir.path(), &[], &arguments);
        // K5.4
        assert!(code != Some(0) && !problems.contains("SECRET"), "{problems}");
        assert!(problems.matches("?[secret]`").count() == 2, "{problems}");
    }
}

#[test]
fn a_variable_is_toml_or_text_and_its_problems_name_it() {
    let dir = with_config("[routing]\nretries = 1\n");
    let show = |variables: &[(&str, &str)]| {
        pointsman(dir.path(), variables, &["config", "show", "--config", "p.toml"])
    };
    // N1.2
    let (code, shown, problems) = show(&[
        ("POINTSMAN__SERVER__TENANT_HEADER", "5"),
        ("POINTSMAN__AUTH__TRUSTED_PROXIES", "[\"127.0.0.1\"]"),
        ("POINTSMAN__SERVER__CORS_ORIGINS", r#"["https://a.example", "https://b.example"]"#),
        ("POINTSMAN__ROUTING__LOCAL_FALLBACK", "true"),
        ("POINTSMAN__QUEUE__TIMEOUT", "2m"),
    ]);
    assert_eq!((code, problems.as_str()), (Some(0), ""));
    for (header, expected) in [
        ("[server]", "tenant_header = \"5\""),
        ("[server]", "cors_origins = [\"https://a.example\", \"https://b.example\"]"),
        ("[routing]", "local_fallback = true"),
        ("[queue]", "timeout = \"2m\""),
    ] {
        let key = expected.split(" = ").next().unwrap();
        assert!(line(&shown, header, key).starts_with(expected), "{expected}: {shown}");
    }
    // N1.3
    let (code, _, problems) = show(&[
        ("POINTSMAN__ROUTING__RETRYS", "1"),
        ("POINTSMAN__ROUTING__RETRIES", "many"),
        ("POINTSMAN__ROUTING__BLOCK_SIZE", "-1"),
        ("POINTSMAN__LIMITS__CHOICES", "0"),
        ("POINTSMAN__QUEUE__LIMIT__DEEPER", "1"),
        ("POINTSMAN__SERVER__API_KEYS", "sk-SECRET"),
        ("POINTSMAN__SERVER__ADMIN_TOKEN", "{ file = '/no/such' }"),
        ("POINTSMAN__POLICIES__TRUSTED_KEYS", "[{ env = 'POINTSMAN_NO_SUCH' }]"),
        ("POINTSMAN__SERVER____X", "1"),
        ("POINTSMAN__SERVR__LISTEN", "1"),
    ]);
    assert_eq!(code, Some(2));
    for expected in [
        "POINTSMAN__ROUTING__RETRYS: unknown key `retrys`: did you mean `retries`?",
        "POINTSMAN__ROUTING__RETRIES: invalid type: string \"many\", expected a whole number of 0 or more",
        "POINTSMAN__ROUTING__BLOCK_SIZE: invalid value: integer `-1`, expected a whole number of 0 or more",
        "POINTSMAN__SERVER__ADMIN_TOKEN: cannot read the file `/no/such`",
        "POINTSMAN__POLICIES__TRUSTED_KEYS: cannot read the environment variable `POINTSMAN_NO_SUCH`",
        "POINTSMAN__LIMITS__CHOICES: `0` is too small: expected 1 or more",
        "POINTSMAN__SERVER____X: the name has an empty part: expected POINTSMAN__SECTION__KEY",
        "POINTSMAN__SERVR__LISTEN: unknown key `servr`: did you mean `server`?",
        "POINTSMAN__QUEUE__LIMIT__DEEPER: ",
        "POINTSMAN__SERVER__API_KEYS: ",
    ] {
        assert!(problems.contains(expected), "{expected}: {problems}");
    }
    assert!(!problems.contains("SECRET"), "{problems}");
}

#[test]
fn serve_and_check_config_use_the_variables() {
    let dir = with_config("");
    let variables = [("POINTSMAN__ROUTING__ORDER", "decode_first")];
    for arguments in [&["check-config", "p.toml"][..], &["serve", "--config", "p.toml"], &["serve"]] {
        let (code, _, problems) = pointsman(dir.path(), &variables, arguments);
        assert_eq!(code, Some(2), "{arguments:?}");
        // N1.1
        assert!(problems.contains("POINTSMAN__ROUTING__ORDER: unknown value `decode_first`"), "{problems}");
    }
}

/// The dotted paths of the properties of a schema; `*` stands for any name.
fn properties(root: &Value, schema: &Value, path: &str, all: &mut BTreeSet<String>, depth: usize) {
    assert!(depth < 20, "the schema of {path} contains itself");
    if let Some(reference) = schema["$ref"].as_str() {
        let target = root.pointer(reference.trim_start_matches('#')).unwrap();
        return properties(root, target, path, all, depth + 1);
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        for option in schema[key].as_array().into_iter().flatten() {
            properties(root, option, path, all, depth + 1);
        }
    }
    if schema["items"].is_object() {
        properties(root, &schema["items"], path, all, depth + 1);
    }
    let joined = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
        all.insert(joined(key));
        properties(root, inner, &joined(key), all, depth + 1);
    }
    if schema["additionalProperties"].is_object() {
        properties(root, &schema["additionalProperties"], &joined("*"), all, depth + 1);
    }
}

/// The dotted paths of the keys of a document.
fn keys(value: &toml::Value, path: &str, all: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, inner) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                all.insert(path.clone());
                keys(inner, &path, all);
            }
        }
        toml::Value::Array(elements) => elements.iter().for_each(|element| keys(element, path, all)),
        _ => {}
    }
}

/// Tables whose keys the operator names.
const FREE: [&str; 9] =
    ["pins", "min_versions", "labels", "topology", "models", "slots", "busy", "tenants", "defaults"];

/// Returns whether the schema has a key, or lets the operator name it.
fn is_described(path: &str, described: &BTreeSet<String>) -> bool {
    let parts: Vec<&str> = path.split('.').collect();
    let matches = |known: &String| {
        let known: Vec<&str> = known.split('.').collect();
        known.len() == parts.len()
            && known.iter().zip(&parts).all(|(known, key)| *known == "*" || known == key)
    };
    let is_free =
        || path.rsplit_once('.').is_some_and(|(table, _)| FREE.iter().any(|free| table.ends_with(free)));
    described.iter().any(matches) || is_free()
}

/// The example with the keys and tables that are comments.
fn with_comments(example: &str) -> String {
    let is_key = |text: &str| {
        text.starts_with('[')
            || text.split_once(" = ").is_some_and(|(key, _)| {
                key.bytes().all(|byte| b"_-\"*".contains(&byte) || byte.is_ascii_alphanumeric())
            })
    };
    let uncommented = |line: &str| match line.strip_prefix("# ") {
        Some(text) if is_key(text) => format!("{text}\n"),
        _ => format!("{line}\n"),
    };
    example.lines().map(uncommented).collect()
}

#[test]
fn the_example_unchanged_is_an_empty_configuration_without_a_key() {
    let (dir, free) = (with_config(""), ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    let (code, example, _) = pointsman(dir.path(), &[], &["config", "example"]);
    assert_eq!(code, Some(0));
    fs::write(dir.path().join("example.toml"), &example).unwrap();
    // N3.3
    let (code, out, text) =
        pointsman(dir.path(), &[], &[&["check-config", "example.toml"][..], &free].concat());
    assert!(code == Some(0) && out.ends_with("ok\n"), "{text}");
    let values = |file: &str| {
        let (code, shown, text) = pointsman(dir.path(), &[], &["config", "show", "--json", "--config", file]);
        assert_eq!(code, Some(0), "{text}");
        let values: Vec<Value> = serde_json::from_str(&shown).unwrap();
        let of = |value: &Value| (value["path"].as_str().unwrap().to_owned(), value["value"].clone());
        values.iter().map(of).collect::<BTreeMap<_, _>>()
    };
    // N3.3
    assert_eq!(values("example.toml"), values("p.toml"));
    let digests = example.match_indices("sha256:").map(|(at, _)| &example[at + 7..]);
    let usable = |rest: &str| rest.bytes().take_while(u8::is_ascii_hexdigit).count() == 64;
    // N3.3
    assert_eq!(digests.filter(|rest| usable(rest)).count(), 0, "{example}");
    // N3.4: of the types, nothing is wrong; `…` stands for what only the operator has.
    fs::write(dir.path().join("all.toml"), with_comments(&example)).unwrap();
    let (_, _, text) = pointsman(dir.path(), &[], &["check-config", "all.toml"]);
    assert!(
        !["unknown", "invalid type", "syntax", "missing field"].iter().any(|wrong| text.contains(wrong)),
        "{text}"
    );
}

#[test]
fn a_key_of_the_documentation_is_refused_by_name() {
    let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let def = "sha256:CB8379AC2098AA165029E3938A51DA0BCECFC008FD6795F401178647F96C5B34";
    let slow = "$argon2id$v=19$m=19456,t=2,p=1$c2FsdHNhbHRzYWx0$Pk5YwVfvZq2xCzqVbXwV0m3b3Q5v2X0n5V8mZc0X1yM";
    let file = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\nadmin_token = \"def\"\n\
         [auth]\nkey_dir = \"keys\"\n[[auth.keys]]\nid = \"a\"\ndigest = \"{abc}\"\n\
         [[auth.keys]]\nid = \"b\"\ndigest = {{ file = \"b\" }}\n\
         [[auth.keys]]\nid = \"c\"\ndigest = \"{slow}\"\n\
         [[auth.operators]]\nid = \"d\"\nrole = \"operator\"\ndigest = \"{def}\"\n"
    );
    let dir = with_config(&file);
    fs::write(dir.path().join("b"), format!("{abc}\n")).unwrap();
    fs::create_dir(dir.path().join("keys")).unwrap();
    fs::write(dir.path().join("keys/e"), format!("[[auth.keys]]\nid = \"e\"\ndigest = \"{def}\"\n")).unwrap();
    let example =
        |key: &str| format!("the key `{key}` was an example in the documentation, so everyone knows it");
    for arguments in [&["check-config", "p.toml"][..], &["serve", "--config", "p.toml"]] {
        let (code, _, text) = pointsman(dir.path(), &[], arguments);
        assert_eq!(code, Some(2), "{text}");
        for (path, message) in [
            ("server.admin_token", example("def")),
            ("auth.keys[0].digest", example("abc")),
            ("auth.keys[1].digest", example("abc")),
            ("auth.keys[2].digest", "this digest was an example in the documentation".to_owned()),
            ("auth.operators[0].digest", example("def")),
            ("auth.key_dir(keys/e)[0].digest", example("def")),
        ] {
            // K1.8
            assert!(
                text.contains(&format!("{path}: {message}: `pointsman key new` makes")),
                "{path}: {text}"
            );
        }
    }
}

#[test]
fn the_schema_has_every_key_of_the_example_with_type_default_and_text() {
    let dir = with_config("");
    let (code, schema, _) = pointsman(dir.path(), &[], &["config", "schema"]);
    assert_eq!(code, Some(0));
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let (code, example, _) = pointsman(dir.path(), &[], &["config", "example"]);
    assert_eq!(code, Some(0));
    let mut described = BTreeSet::new();
    properties(&schema, &schema, "", &mut described, 0);
    let mut written = BTreeSet::new();
    keys(&toml::Value::Table(with_comments(&example).parse().unwrap()), "", &mut written);
    // N3.1, N3.4
    let unknown: Vec<&String> = written.iter().filter(|path| !is_described(path, &described)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let server = schema.pointer("/$defs/Server").unwrap();
    assert_eq!(server["additionalProperties"], false);
    let threads = &server["properties"]["threads"];
    assert_eq!((&threads["type"], &threads["default"]), (&"integer".into(), &0.into()));
    assert!(threads["description"].as_str().unwrap().starts_with("Number of threads"));
    let timeouts = schema.pointer("/$defs/Timeouts/properties/connect").unwrap();
    assert_eq!((&timeouts["type"], &timeouts["default"]), (&"string".into(), &"2s".into()));

    // N3.2: the sections and keys with a default are all in the example.
    let sections = schema["properties"].as_object().unwrap().keys();
    let missing: Vec<&String> = sections
        .filter(|section| {
            !example.contains(&format!("[{section}")) && !example.contains(&format!("[[{section}"))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    let leaf = |path: &&String| path.split('.').count() == 2 && !path.contains('*');
    let absent: Vec<&String> = described
        .iter()
        .filter(leaf)
        .filter(|path| {
            let key = path.rsplit('.').next().unwrap();
            !example.contains(&format!("{key} = "))
                && !example.contains(&format!(".{key}]"))
                && !example.contains(&format!("{key}."))
        })
        .collect();
    assert!(absent.is_empty(), "described, not in the example: {absent:?}");
}
