// Command kube is one program with many names: the parts of a Kubernetes control plane that the
// test bed starts, chosen by argv[0] or by the first argument (`kube etcd …`, `kube kube-apiserver …`,
// `kube kubectl …`). One link instead of three, and every part has the same version.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver": apiserver.NewAPIServerCommand,
	"kubectl":        kubectl.NewDefaultKubectlCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	if _, known := programs[name]; !known && name != "etcd" && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, known := programs[name]
	if !known {
		fmt.Fprintln(os.Stderr, "unknown program:", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
