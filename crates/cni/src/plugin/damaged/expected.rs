//! The error codes that a call must get by the specification when no agent answers. This reads documents member by member, and shares
//! no code with the plugin.

use std::ffi::OsString;

use serde_json::Value;

use super::{COMMANDS, Call};

/// No error: the document of VERSION.
pub(super) const VERSIONS: u32 = 0;
/// Members of the configuration that are texts.
const TEXTS: [&str; 4] = ["cniVersion", "name", "agentSocket", "deletionQueue"];
const ATTACHMENTS: &str = "cni.dev/valid-attachments";

/// The codes, of which the call must get one.
pub(super) fn codes(call: &Call) -> Vec<u32> {
    let Some(variables) = texts(&call.variables) else { return vec![4] };
    let [command, .., args] = variables;
    let is_wrong = |pair: &str| !pair.is_empty() && !pair.contains('=');
    if !COMMANDS.contains(&command) || args.split(';').any(is_wrong) {
        return vec![4];
    }
    let mut codes = of_document(variables, &call.config);
    // Which one of two members counts, or that both are an error, only the text can tell.
    if call.is_textual {
        codes.push(6);
    }
    codes
}

/// The codes if each member exists once.
fn of_document([command, container, netns, interface, _]: [&str; 5], config: &[u8]) -> Vec<u32> {
    let is_version = command == "VERSION";
    let blank = config.iter().all(u8::is_ascii_whitespace);
    let parsed = if blank && is_version { b"{}" } else { config };
    let Ok(Value::Object(config)) = serde_json::from_slice::<Value>(parsed) else { return vec![6] };
    let is_text = |name: &&str| config.get(*name).is_none_or(Value::is_string);
    if !TEXTS.iter().all(is_text) || !config.get(ATTACHMENTS).is_none_or(are_attachments) {
        return vec![6];
    }
    if is_version {
        return vec![VERSIONS];
    }
    let text = |name: &str| config.get(name).and_then(Value::as_str).unwrap_or_default();
    if !["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"].contains(&text("cniVersion")) {
        return vec![1];
    }
    if text("name").is_empty() {
        return vec![7];
    }
    let is_of_pod = ["ADD", "DEL", "CHECK"].contains(&command);
    if is_of_pod
        && (!is_container(container) || !is_interface(interface) || (netns.is_empty() && command != "DEL"))
    {
        return vec![4];
    }
    let result = config.get("prevResult").unwrap_or(&Value::Null);
    let is_list = |name: &str| match result.get(name) {
        None | Some(Value::Null) => true,
        Some(list) => list.as_array().is_some_and(|list| list.iter().all(Value::is_object)),
    };
    if !(result.is_null() || result.is_object()) || !["interfaces", "ips", "routes"].into_iter().all(is_list)
    {
        return vec![6];
    }
    let is_there = result["interfaces"].as_array().into_iter().flatten().any(|each| {
        each["name"].as_str() == Some(interface)
            && each["sandbox"].as_str().is_some_and(|path| !path.is_empty())
    });
    match command {
        "ADD" if is_there => vec![103],
        "CHECK" if result.is_null() => vec![7],
        "CHECK" if !is_there => vec![102],
        _ => of_addresses(command, config.get("ipam").unwrap_or(&Value::Null)),
    }
}

/// The agent does not answer: STATUS says so, and everything else can be tried again.
fn of_addresses(command: &str, ipam: &Value) -> Vec<u32> {
    let section = match ipam {
        Value::Null => return without_agent(command),
        Value::Object(section) => section,
        _ => return vec![7],
    };
    match section.get("type") {
        None => without_agent(command),
        Some(Value::String(name)) if name.is_empty() && section.len() == 1 => without_agent(command),
        Some(Value::String(name)) if name.is_empty() || name.contains('/') || name.contains('\\') => vec![7],
        Some(Value::String(name)) => match (command, name.as_str()) {
            ("ADD", "host-local") => vec![5, 7, 11, 103],
            ("ADD", name) if !["calico-ipam", "tortie"].contains(&name) => vec![4],
            _ => without_agent(command),
        },
        Some(_) => vec![7],
    }
}

fn without_agent(command: &str) -> Vec<u32> {
    vec![if command == "STATUS" { 50 } else { 11 }]
}

fn texts(variables: &[OsString; 5]) -> Option<[&str; 5]> {
    let texts: Option<Vec<&str>> = variables.iter().map(|variable| variable.to_str()).collect();
    texts?.try_into().ok()
}

/// A list of containers and interfaces; runtimes in Go write an empty one as null.
fn are_attachments(value: &Value) -> bool {
    let is_one = |one: &Value| match one {
        Value::Object(one) => {
            ["containerID", "ifname"].iter().all(|name| one.get(*name).is_some_and(Value::is_string))
        }
        // The members in their order.
        Value::Array(one) => one.len() == 2 && one.iter().all(Value::is_string),
        _ => false,
    };
    value.is_null() || value.as_array().is_some_and(|list| list.iter().all(is_one))
}

fn is_container(id: &str) -> bool {
    let is_allowed = |(at, letter): (usize, char)| {
        matches!(letter, 'a'..='z' | 'A'..='Z' | '0'..='9') || (at > 0 && matches!(letter, '_' | '.' | '-'))
    };
    !id.is_empty() && id.char_indices().all(is_allowed)
}

fn is_interface(name: &str) -> bool {
    let is_forbidden = |letter: char| letter == '/' || letter == ':' || letter.is_whitespace();
    !name.is_empty() && name.len() < 16 && ![".", ".."].contains(&name) && !name.chars().any(is_forbidden)
}
