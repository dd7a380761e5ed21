//! What the agent reads: calls of the plugin with the pod's annotations, questions of operators, options, and the state of an earlier agent.

use std::collections::BTreeMap;

use serde_json::json;
use tortie_agent::{AddressMethod, CniIpam, parsers};
use tortie_api::{Key, Kind, Resource};
use tortie_bgp::codec::AnyCommunity;
use tortie_cni::{Command, Invocation};
use tortie_deploy::ChainedPlugins;

use crate::input::Input;

/// A call as the plugin passes it: arguments (`K=V;…`) and annotations of the pod, each of which ends with NUL, and the configuration.
pub fn agent_call(bytes: &[u8]) {
    let mut input = Input(bytes);
    let pairs = |text: &str| -> BTreeMap<String, String> {
        let pairs = text.split(';').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let (args, annotations) = (pairs(input.text()), pairs(input.text()));
    let Ok(config) = serde_json::from_slice(input.0) else { return };
    let call = Invocation {
        command: Command::Add,
        container_id: "c".to_owned(),
        netns: "/n".to_owned(),
        interface: "eth0".to_owned(),
        args,
        config,
        delegated: Vec::new(),
    };
    let value = json!({"metadata": {"name": "p", "namespace": "n", "annotations": annotations},
        "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 8080}]}]}});
    let Ok(Resource::Pod(pod)) = Resource::read(&Key::namespaced(Kind::Pod, "n", "p"), &value) else {
        return;
    };
    let _ = parsers::call(&call, &pod, &annotations);
}

/// A question of an operator.
pub fn agent_question(bytes: &[u8]) {
    if let Ok(ask) = parsers::question(bytes) {
        let written = json!({"version": tortie_agent::control::VERSION, "ask": ask}).to_string();
        assert_eq!(parsers::question(written.as_bytes()), Ok(ask), "{written}");
    }
}

/// An option of the agent, or a setting of BGP. What is written of it is read as before.
pub fn agent_option(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = (text.parse::<AddressMethod>(), text.parse::<CniIpam>());
    if let Ok(plugins) = text.parse::<ChainedPlugins>() {
        assert_eq!(plugins.to_string().parse().as_ref(), Ok(&plugins));
    }
    if let Ok(community) = text.parse::<AnyCommunity>() {
        let _ = format!("{community:?}");
    }
}

/// The state that an earlier agent has saved. Because of its checksum, the bytes are also taken as the content of an intact file.
pub fn saved_state(bytes: &[u8]) {
    let _ = parsers::saved_state(bytes);
    let Ok(file) = parsers::with_first_line(bytes) else { return };
    if let Ok(written) = parsers::saved_state(&file) {
        assert_eq!(parsers::saved_state(&written).as_ref(), Ok(&written));
    }
}
