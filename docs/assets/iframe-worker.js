/* A page that is opened as a file may start no worker, so the search would find nothing: there this does a worker's
   work in a hidden frame. From a server the browser's own workers are used. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => {
        const told = new MessageEvent("message", { data })
        this.dispatchEvent(told)
        if (this.onmessage) this.onmessage(told)
      })
      inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve())
      const load = url => new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: new URL(url, location.href), onload: done, onerror: failed })
        inside.document.body.append(script)
      })
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() { this.frame.remove() }
  }
}
