{{/*
The objects of a file of the kustomization, as JSON: an array. The namespace is put in after parsing, where it stands in a
string: one that is called 123 stays one. Takes (list $ FILE).
*/}}
{{- define "headstart.read" -}}
{{- $root := index . 0 -}}
{{- $objects := list -}}
{{- range regexSplit "(?m)^---$" (printf "files/%s" (index . 1) | $root.Files.Get) -1 -}}
{{- with fromYaml . -}}{{- $objects = append $objects . -}}{{- end -}}
{{- end -}}
{{- toJson $objects | replace "headstart-system" $root.Release.Namespace -}}
{{- end -}}

{{/*
An object with the release's labels. Takes (list $ OBJECT).
*/}}
{{- define "headstart.write" -}}
{{- $root := index . 0 -}}
{{- $object := index . 1 -}}
{{- $labels := dict
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/managed-by" $root.Release.Service
  "app.kubernetes.io/name" "headstart"
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") -}}
{{- $_ := set $object.metadata "labels" (mergeOverwrite (default dict $object.metadata.labels) $labels) -}}
---
{{ toYaml $object }}
{{ end -}}

{{/*
All objects of a file of the kustomization, with the release's labels. Takes (list $ FILE).
*/}}
{{- define "headstart.objects" -}}
{{- $root := index . 0 -}}
{{- range include "headstart.read" . | fromJsonArray -}}
{{- include "headstart.write" (list $root .) -}}
{{- end -}}
{{- end -}}
