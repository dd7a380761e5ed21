// Command kube is Kubernetes in one binary, for tests: its first argument names the component to run.
//
//	kube kube-apiserver --etcd-servers=…
//	kube kubectl get nodes
//
// The components share most of their code, so one binary builds in half of the time of four, and has a third of the
// size. To add one (kubelet, kube-proxy), add a line to `components` and run `go mod tidy`.
package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// components maps the name of each component to what makes its command.
var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": manager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
}

func main() {
	if len(os.Args) < 2 {
		usage("no component is named")
	}
	name := os.Args[1]
	command, known := components[name]
	if !known {
		usage(fmt.Sprintf("component %q does not exist", name))
	}
	// A component parses os.Args: it must see its own name first.
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command()))
}

// usage reports the mistake and the components, and exits.
func usage(mistake string) {
	var names []string
	for name := range components {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Fprintf(os.Stderr, "kube: %s; components: %s\n", mistake, strings.Join(names, ", "))
	os.Exit(2)
}
