//! Splitting of components that are written here. Whole interpreters are split in the tests of the gateway.

use wasmtime::{Engine, Module, Store, component};

use super::*;

/// Instructions of more than [`MIN_CODE_BYTES`], which do nothing.
fn much_code() -> String {
    "(drop (i32.const 123456789)) ".repeat(MIN_CODE_BYTES / 4)
}

/// A component with one module of its own memory, whose `get` returns a number from it.
fn with_memory(number: u8, more: &str) -> Vec<u8> {
    let code = much_code();
    let text = format!(
        r#"(component
            (core module $small (func (export "one") (result i32) (i32.const 1)))
            (core instance $one (instantiate $small))
            (core module $large
                (import "one" "one" (func $one (result i32)))
                (memory (export "memory") 1) (table 2 funcref) (global $g (mut i32) (i32.const 5))
                (data (i32.const 8) "\{number:02x}") {more}
                (func (export "much") {code})
                (func (export "get") (result i32)
                    (i32.add (call $one) (i32.add (global.get $g) (i32.load8_u (i32.const 8))))))
            (core instance $made (instantiate $large (with "one" (instance $one))))
            (func (export "get") (result u32) (canon lift (core func $made "get"))))"#
    );
    wat::parse_str(text).expect("a component")
}

fn engine() -> Engine {
    let mut config = wasmtime::Config::new();
    config.wasm_component_model(true).strategy(wasmtime::Strategy::Cranelift);
    Engine::new(&config).expect("an engine")
}

/// Calls `get` of the component: whole, or of its parts.
fn get(engine: &Engine, component: &[u8], modules: &[Vec<u8>]) -> u32 {
    let mut linker = component::Linker::<()>::new(engine);
    for (number, module) in modules.iter().enumerate() {
        let module = Module::new(engine, module).expect("a valid module");
        linker.root().module(&import_name(number), &module).expect("a new name");
    }
    let mut store = Store::new(engine, ());
    let component = component::Component::new(engine, component).expect("a valid component");
    let instance = linker.instantiate(&mut store, &component).expect("an instance");
    let get = instance.get_typed_func::<(), (u32,)>(&mut store, "get").expect("its type");
    get.call(&mut store, ()).expect("an answer").0
}

#[test]
fn a_component_of_parts_answers_as_the_whole_one() {
    let engine = engine();
    let whole = with_memory(7, "");
    let split = split(&whole).expect("it can be split");
    assert_eq!((split.modules.len(), split.memories, split.tables), (1, 1, 1));
    assert_eq!(get(&engine, &whole, &[]), 13);
    assert_eq!(get(&engine, &split.remainder, &split.modules), 13);
    assert!(split.remainder.len() < 4_096, "{} bytes", split.remainder.len());
}

#[test]
fn code_is_the_same_whatever_the_memory_holds() {
    let (one, two) = (split(&with_memory(1, "")).expect("split"), split(&with_memory(2, "")).expect("split"));
    assert_eq!(one.modules, two.modules);
    assert_ne!(one.remainder, two.remainder);
    let other = split(&with_memory(1, r#"(data (i32.const 99) "more")"#)).expect("split");
    assert_eq!(one.modules, other.modules);
}

#[test]
fn a_module_whose_code_reads_its_segments_stays_whole() {
    let init = r#"(data $d "x") (func (memory.init $d (i32.const 0) (i32.const 0) (i32.const 1)))"#;
    assert!(split(&with_memory(1, init)).is_none());
    let drop = r#"(data $d (i32.const 1) "x") (func (data.drop $d))"#;
    assert!(split(&with_memory(1, drop)).is_none());
}

#[test]
fn a_module_that_imports_its_memory_is_taken_as_it_is() {
    let code = much_code();
    let text = format!(
        r#"(component
            (core module $memory (memory (export "m") 1) (data (i32.const 8) "\09"))
            (core module $large
                (import "env" "m" (memory 1))
                (func (export "much") {code})
                (func (export "get") (result i32) (i32.load8_u (i32.const 8))))
            (core instance $memory (instantiate $memory))
            (core instance $made (instantiate $large (with "env" (instance $memory))))
            (func (export "get") (result u32) (canon lift (core func $made "get"))))"#
    );
    let split = split(&wat::parse_str(text).expect("a component")).expect("it can be split");
    assert_eq!((split.modules.len(), split.memories, split.tables), (1, 1, 0));
    assert_eq!(get(&engine(), &split.remainder, &split.modules), 9);
}

#[test]
fn what_componentizers_do_not_make_stays_whole() {
    let code = much_code();
    let large = format!(r#"(core module $large (func (export "much") {code}))"#);
    for text in [
        // Nothing large.
        r#"(component (core module (func (export "one"))))"#.to_owned(),
        // A module from outside.
        format!(r#"(component (import "m" (core module)) {large})"#),
        // Modules of nested components, or passed to them.
        format!(r#"(component {large} (component {large}))"#),
        format!(r#"(component {large} (component (alias outer 1 $large (core module $m))))"#),
        format!(
            r#"(component {large} (component $c (import "m" (core module)))
                (instance (instantiate $c (with "m" (core module $large)))))"#
        ),
        format!(r#"(component {large} (export "m" (core module $large)))"#),
        format!(r#"(component (core type (module)) {large})"#),
    ] {
        let begin: String = text.chars().take(60).collect();
        assert!(split(&wat::parse_str(&text).expect(&begin)).is_none(), "{begin}");
    }
}

#[test]
fn t9_a_large_module_that_is_instantiated_twice_stays_whole() {
    let code = much_code();
    let text = |more: &str| {
        let text = format!(
            r#"(component
                (core module $large (global (mut i64) (i64.const 1)) (func (export "much") {code}))
                (core instance (instantiate $large)) {more})"#
        );
        wat::parse_str(text).expect("a component")
    };
    assert!(split(&text("")).is_some());
    // T9.1
    assert!(split(&text("(core instance (instantiate $large))")).is_none());
}

#[test]
fn truncated_files_are_left_to_the_compiler() {
    let whole = with_memory(1, "");
    for length in (0..whole.len()).step_by(997).chain(0..400) {
        let _ = split(&whole[..length]);
    }
}

/// wasmtime accepts the type of the import for the module: the two are made by different code.
#[test]
fn the_type_of_the_import_has_each_kind_of_item() {
    let code = much_code();
    let text = format!(
        r#"(component
            (core module $large
                (type (func (param i32 f64) (result i64)))
                (memory (export "m") 1 2) (table (export "t") 1 3 funcref)
                (global (export "g") (mut i32) (i32.const 5)) (global (export "h") f32 (f32.const 1))
                (func (export "f") (type 0) (i64.const 1))
                (func (export "get") (result i32) (i32.const 4)) (func {code}))
            (core instance $made (instantiate $large))
            (alias core export $made "g" (core global)) (alias core export $made "t" (core table))
            (func (export "get") (result u32) (canon lift (core func $made "get"))))"#
    );
    let split = split(&wat::parse_str(text).expect("a component")).expect("it can be split");
    assert_eq!(get(&engine(), &split.remainder, &split.modules), 4);
    let module = Module::new(&engine(), &split.modules[0]).expect("valid");
    assert_eq!((module.exports().len(), module.imports().len()), (6, 1));
}
