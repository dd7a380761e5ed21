//! The WorkloadEndpoint of a pod's interface, which ADD publishes: with the allocation of its address where the datastore and
//! the system allow that, otherwise while the interface is configured, or afterwards.

use tortie_api::Position;
use tortie_api::kubernetes::Pod;
use tortie_calc::Assigned;
use tortie_cni::{Failure, Invocation};
use tortie_dataplane::{EndpointId, PodInterface, PreparedLink};
use tortie_store::Stored;

use crate::obtain::Obtained;
use crate::pods::{Pods, store_failure};
use crate::publication::{Link, with_interface};
use crate::runtime_config;

impl Pods {
    /// Connects the pod, and stores its endpoint, unless that is done. If the link exists already, it exists closed, and nothing
    /// but policy opens it; so the endpoint is stored while the link gets the pod's address.
    pub(crate) async fn connect_and_publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        mut obtained: Obtained,
        prepared: Option<PreparedLink>,
    ) -> Result<(PodInterface, Position), Failure> {
        let mac = runtime_config::wanted_mac(call, &pod.1)?;
        let attachment = self.attachment(call, id, &obtained.addresses, mac, self.limits(call, pod)?)?;
        let planned = prepared.as_ref().and_then(|_| self.wiring.planned(&attachment));
        let (published, link) = (obtained.published, std::mem::replace(&mut obtained.link, Link::Unchanged));
        let connect = async {
            match link {
                Link::Connected(interface) => Ok(interface),
                Link::Unchanged => self.connect(attachment, prepared).await,
                Link::Deleted => self.connect(attachment, None).await,
            }
        };
        let publish = async |interface: &PodInterface| match published {
            Some(position) => Ok(position),
            None => self.publish(call, id, pod, &obtained, interface).await,
        };
        let (interface, published) = match planned {
            // Both until they have ended: what appears after a failure would stay.
            Some(planned) => {
                self.refuse_blocked(id)?;
                let (connected, published) = tokio::join!(connect, publish(&planned));
                (connected?, published?)
            }
            None => {
                let interface = connect.await?;
                self.refuse_blocked(id)?;
                let published = publish(&interface).await?;
                (interface, published)
            }
        };
        self.refuse_blocked(id)?;
        Ok((interface, published))
    }

    /// Publishes the WorkloadEndpoint: from here on every node knows the pod.
    async fn publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        obtained: &Obtained,
        interface: &PodInterface,
    ) -> Result<Position, Failure> {
        let endpoint = self.endpoint(call, id, pod, obtained.outside);
        let endpoint = with_interface(endpoint, &obtained.addresses, interface);
        let addresses = obtained.addresses.iter().map(|own| own.address).collect();
        self.assigned_pods
            .insert(self.key(id), Assigned { container_id: call.container_id.clone(), addresses });
        self.store.publish(&endpoint).await.map_err(store_failure)
    }
}
