//! What the API server of Kubernetes sends, and the file that says where it is.

use tortie_api::Resource;
use tortie_store::kubernetes::CalicoGroup;
use tortie_store::{Event, Stored, parsers};

use crate::input::Input;

/// A byte for the group of Calico's kinds and the kind, and the lines of a watch.
pub fn kubernetes_watch(bytes: &[u8]) {
    let mut input = Input(bytes);
    let group = if input.byte().is_multiple_of(2) { CalicoGroup::Crd } else { CalicoGroup::Native };
    let kind = input.kind();
    for event in parsers::kubernetes_line(group, kind, input.0).flatten() {
        if let Event::Put(stored) = event {
            used(group, &stored);
        }
    }
}

/// A byte for the group of Calico's kinds and the kind, and an answer to a list.
pub fn kubernetes_list(bytes: &[u8]) {
    let mut input = Input(bytes);
    let group = if input.byte().is_multiple_of(2) { CalicoGroup::Crd } else { CalicoGroup::Native };
    let kind = input.kind();
    for stored in parsers::kubernetes_list(group, kind, input.0).unwrap_or_default() {
        used(group, &stored);
    }
}

/// Reads an object, and sends it back.
fn used(group: CalicoGroup, stored: &Stored) {
    let _ = Resource::read_what_can_be(&stored.key, &stored.value);
    if let Ok(sent) = parsers::kubernetes_sent(group, &stored.key, stored.value.clone()) {
        assert!(sent.is_object(), "{}: {sent}", stored.key);
    }
}

/// A line of the watch of a Secret.
pub fn kubernetes_secret(bytes: &[u8]) {
    parsers::secret_line(bytes);
}

/// A kubeconfig. The programs and files that it names are left alone.
pub fn kubeconfig(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = parsers::kubeconfig(text);
}
