//! Reads the input of the checks from a syntax tree: declared modules, imported names, and mentioned paths.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Item, UseTree};

/// A name that `use` brings into a module; `name` is empty for a glob.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) name: String,
    pub(crate) path: Vec<String>,
}

/// Returns the modules that have a file of their own and are not tests.
pub(crate) fn declared_modules(file: &syn::File) -> Vec<String> {
    let declared = file.items.iter().filter_map(|item| match item {
        Item::Mod(module) if module.content.is_none() && !is_test(&module.attrs) => {
            Some(module.ident.to_string())
        }
        _ => None,
    });
    declared.collect()
}

/// Whether an item exists only in tests or under a checker.
pub(crate) fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().filter(|attr| attr.path().is_ident("cfg")).any(|attr| {
        let condition = attr.to_token_stream().to_string();
        !condition.contains("not") && (condition.contains("test") || condition.contains("loom"))
    })
}

/// Returns the names that the module's own `use` items import.
pub(crate) fn imports(file: &syn::File) -> Vec<Import> {
    let mut imports = Vec::new();
    for item in &file.items {
        if let Item::Use(item) = item
            && !is_test(&item.attrs)
        {
            flatten(&item.tree, Vec::new(), &mut imports);
        }
    }
    imports
}

/// Returns the paths that begin with `crate`, `super` or `self`, from the whole file except tests. Paths of
/// `use` items are included.
pub(crate) fn mentioned(file: &syn::File) -> Vec<Vec<String>> {
    let mut paths: Vec<_> = imports(file).into_iter().map(|import| import.path).collect();
    for item in &file.items {
        match item {
            Item::Use(_) => {}
            Item::Mod(module) if is_test(&module.attrs) => {}
            Item::Fn(function) if is_test(&function.attrs) => {}
            Item::Impl(block) if is_test(&block.attrs) => {}
            item => scan(item.to_token_stream(), &mut paths),
        }
    }
    let anchored = ["crate", "super", "self"];
    paths.retain(|path| path.first().is_some_and(|first| anchored.contains(&first.as_str())));
    paths
}

fn flatten(tree: &UseTree, before: Vec<String>, imports: &mut Vec<Import>) {
    let with = |ident: &syn::Ident| [before.clone(), vec![ident.to_string()]].concat();
    match tree {
        UseTree::Path(path) => flatten(&path.tree, with(&path.ident), imports),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before.clone(), imports)),
        UseTree::Glob(_) => imports.push(Import { name: String::new(), path: before }),
        UseTree::Rename(rename) => {
            imports.push(Import { name: rename.rename.to_string(), path: with(&rename.ident) });
        }
        UseTree::Name(name) if name.ident == "self" => {
            imports.push(Import { name: before.last().cloned().unwrap_or_default(), path: before });
        }
        UseTree::Name(name) => {
            imports.push(Import { name: name.ident.to_string(), path: with(&name.ident) });
        }
    }
}

/// Collects `a::b::c` sequences, also inside macro calls.
fn scan(tokens: TokenStream, paths: &mut Vec<Vec<String>>) {
    let mut current: Vec<String> = Vec::new();
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(ident) if colons == 2 || current.is_empty() => {
                current.push(ident.to_string());
                colons = 0;
                continue;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' && !current.is_empty() => {
                colons += 1;
                continue;
            }
            TokenTree::Group(group) => scan(group.stream(), paths),
            TokenTree::Ident(ident) => {
                paths.push(std::mem::replace(&mut current, vec![ident.to_string()]));
                colons = 0;
                continue;
            }
            _ => {}
        }
        paths.push(std::mem::take(&mut current));
        colons = 0;
    }
    paths.push(current);
}
