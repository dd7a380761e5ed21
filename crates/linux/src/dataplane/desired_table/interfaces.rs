//! The interfaces of pods that another CNI plugin has connected.

use tortie_dataplane::{Endpoint, EndpointId};

use super::{DesiredTable, Objects, RenderContext};

impl DesiredTable {
    /// Closes the interfaces of pods that are not recognised.
    pub(super) fn update_unclaimed(&mut self, around: &RenderContext<'_>, affected: &mut Objects) {
        let Some(recognised) = around.recognised else { return };
        if self.unclaimed != recognised.unclaimed {
            affected.interfaces.extend(self.unclaimed.symmetric_difference(&recognised.unclaimed).cloned());
            self.unclaimed.clone_from(&recognised.unclaimed);
        }
    }
}

impl RenderContext<'_> {
    /// The interface of a pod; `None` if another plugin has connected it, and it is not recognised.
    pub(super) fn interface_of<'a>(&'a self, id: &EndpointId, endpoint: &'a Endpoint) -> Option<&'a str> {
        match self.recognised {
            Some(recognised) => recognised.interfaces.get(id).map(AsRef::as_ref),
            None => Some(&endpoint.host_interface),
        }
    }
}
